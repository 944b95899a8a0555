"""Stage 4, evaluation: what did each stage gain, and what did it cost?

Seven evaluations, each a module of nanorlhf/evals:

    module            paper                                                     recipes
    summaries         N+ section 5: ROUGE, gold score, win rate, KL, accuracy   tiny, tldr
    reward_models     N+ Table 5: reward models and DPO, calibration            tiny-rm, tldr-rm
    reward_benchmark  RewardBench, RewardBench 2, RM-Bench; length control      rewards
    answers           SO: ten answers per question, metric@k, rank correlation  stackoverflow[-tiny]
    programs          RLCF: programs compiled and executed, pass@k              rlcf[-tiny]
    replies           STR: one reply per question, agreement with self-ranking  str[-tiny]
    checked           answers checked by a program: pass@k of n samples         sums

In: policies, reward models and the data's validation or test rows. Out: a table, eval.json,
samples.jsonl, and report.html with the curves of all stages and the samples side by side.

    python eval.py                                  # the embedded default, recipe tiny
    python eval.py tldr --policies sft runs/tldr/sft ppo runs/tldr/ppo --reward-model runs/tldr/rm
    python eval.py tldr --policies sft runs/tldr/sft ppo along:runs/tldr/ppo   # win rate against KL
    python eval.py tldr-rm --reward-models rm runs/tldr/rm rm runs/tldr/rm_seed2 dpo runs/tldr/dpo
    python eval.py rewards --data runs/rewardbench/data --reward-models rm runs/chat/rm
    python eval.py stackoverflow --encoder roberta-large --encoder-layer 17
    python eval.py rlcf --policies sft runs/rlcf/sft_bench rlcf runs/rlcf/ppo_bench --workers 16
    python eval.py str --rankings ana.jsonl ben.jsonl --encoder google-bert/bert-base-uncased \\
        --self-rank runs/str/data/self_rank.validation.jsonl
"""

from dataclasses import replace

from nanorlhf.cli import command_line
from nanorlhf.evals import benchmarks, checked, reward_models, summaries
from nanorlhf.evals.settings import EvalArgs, PolicyArgs, with_kept_checkpoints
from nanorlhf.recipes import recipes
from nanorlhf.rlcf import evaluate_programs as programs
from nanorlhf.selfrank import evaluate_replies as replies
from nanorlhf.stackoverflow import evaluate_answers as answers

RECIPES: dict[str, tuple[str, EvalArgs]] = {
    **recipes("summaries", summaries.Args),
    **recipes("reward_models", reward_models.Args),
    **recipes("reward_benchmark", benchmarks.Args),
    **recipes("answers", answers.Args),
    **recipes("programs", programs.Args),
    **recipes("replies", replies.Args),
    **recipes("checked", checked.Args),
}


def main(args: EvalArgs) -> dict:
    """Run the evaluation that `args` belongs to and return the contents of eval.json."""
    if isinstance(args, PolicyArgs):
        args = replace(args, policies=with_kept_checkpoints(args.policies))
    evaluations = (summaries, reward_models, benchmarks, answers, programs, replies, checked)
    [evaluation] = (module for module in evaluations if isinstance(args, module.Args))
    return evaluation.main(args)


if __name__ == "__main__":
    command_line(main, RECIPES)

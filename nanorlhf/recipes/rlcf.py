"""Coarse-Tuning Models of Code with RL Feedback (RLCF): the paper's settings and the embedded programs."""

from pathlib import Path

from nanorlhf.training.settings import AdamSettings

BASELINE: dict = dict(  # the baselines train like RLCF
    total_episodes=150_000,
    lr=1e-6,
    max_query_length=500,
    response_length=384,
    temperature=1.0,
)
TINY_ROLLOUTS: dict = dict(
    sft="runs/programs/sft",
    seed=1,
    batch_size=128,
    micro_batch_size=32,
    lr=3e-4,
    max_query_length=160,
    response_length=128,
    temperature=0.6,  # as in the test: at 1 most errors come from tokens that 0.6 never samples
)
TINY_BASELINE: dict = TINY_ROLLOUTS | dict(data=Path("runs/programs/data"), total_episodes=5120)

TINY_TESTS: dict = TINY_ROLLOUTS | dict(  # the tests of the embedded programs as the reward
    data=Path("runs/programs/bench"),
    reward_model=None,
    reward="tests",
    total_episodes=2560,
    num_minibatches=4,
    missing_eos_score=None,  # the tests decide
)

RECIPES: dict = {
    "rlcf": {
        "help": "RLCF: a compiler and a discriminator as feedback",
        "sft": dict(  # CodeGen 350M completes the rest of a method
            data=Path("runs/rlcf/data"),
            rows="code",
            out=Path("runs/rlcf/sft"),
            model="Salesforce/codegen-350M-multi",
            num_epochs=5,
            batch_size=128,
            lr=5e-5,
            schedule="linear",  # not in the paper, like adam and loss_on
            adam=AdamSettings(eps=1e-8),
            loss_on="response",
            max_query_length=500,
            max_response_length=384,
            temperature=0.6,
        ),
        "discriminator": dict(  # triplets as in CodeBERT's pre-training, then samples of the policy
            data=Path("runs/rlcf/data"),
            out=Path("runs/rlcf/discriminator"),
            num_triplet_epochs=5.0,
            triplet_lr=1e-5,
            warmup_steps=1000,
            num_pair_epochs=5.0,
            lr=1e-5,
            max_query_length=500,
            max_response_length=384,
            response_length=384,
        ),
        "rlcf": {},  # Algorithm 1: the paper's settings are the script's defaults
        "programs": dict(  # MBJP, 100 programs per problem and temperature
            data=Path("runs/rlcf/bench"),
            out=Path("runs/rlcf/eval"),
            policies=("sft", "runs/rlcf/sft_bench", "rlcf", "runs/rlcf/ppo_bench"),
            curves=("runs/rlcf/ppo",),
            num_samples=100,
            ks=(1, 10, 100),
            max_query_length=1024,  # MBJP's prompts have up to 931 tokens, and a test must not skip any
            response_length=256,
        ),
    },
    "rlcf-bench": {
        "help": "RLCF: fine-tuning any policy on MBJP before the test",
        "sft": dict(
            data=Path("runs/rlcf/bench"),
            rows="code",
            out=Path("runs/rlcf/ppo_bench"),
            model="runs/rlcf/ppo",
            num_epochs=20,
            batch_size=64,
            lr=5e-5,
            schedule="linear",  # not in the paper, as above
            warmup_steps=200,
            adam=AdamSettings(eps=1e-8),
            loss_on="response",
            max_query_length=500,
            max_response_length=256,
            temperature=0.6,
        ),
    },
    "rlcf-tiny": {
        "help": "the embedded programs, on a CPU in minutes",
        "sft": dict(
            data=Path("runs/programs/data"),
            rows="code",
            out=Path("runs/programs/sft"),
            model=None,
            n_layer=2,
            d_model=96,
            seed=1,
            num_epochs=6,
            batch_size=16,
            lr=3e-3,
            warmup_steps=30,
            loss_on="response",
            max_query_length=160,
            max_response_length=128,
            temperature=0.6,
        ),
        "discriminator": dict(
            data=Path("runs/programs/data"),
            out=Path("runs/programs/discriminator"),
            sft="runs/programs/sft",
            n_layer=2,
            n_head=4,
            d_model=96,
            seed=1,
            num_triplet_epochs=0.25,  # 17 steps; after 70, PPO's programs compiled more often and passed less often
            triplet_lr=5e-4,
            warmup_steps=10,
            num_rows=512,
            num_pair_epochs=1,
            micro_batch_size=32,
            lr=5e-4,
            response_length=128,
            rollout_batch_size=512,
            max_query_length=160,
            max_response_length=128,
        ),
        "rlcf": TINY_ROLLOUTS
        | dict(
            data=Path("runs/programs/data"),
            out=Path("runs/programs/ppo"),
            discriminator="runs/programs/discriminator",
            discriminator_lr=1e-4,
            total_episodes=5120,
            num_minibatches=4,
            num_ppo_epochs=2,
            kl_coef=0.05,
            lam=0.7,  # few episodes: keep the blame near the token that earned it
        ),
        "ppo": TINY_TESTS
        | dict(
            out=Path("runs/programs/ppo_tests"),
            num_ppo_epochs=2,
            kl_target=6.0,  # this and the next four are train_rlcf.py's
            gamma=0.99,
            value_clip_range=None,
            value_coef=1.0,
            score_at="last_token",
        ),
        "grpo": TINY_TESTS | dict(out=Path("runs/programs/grpo_tests"), num_epochs=2),
        "programs": dict(
            data=Path("runs/programs/bench"),
            out=Path("runs/programs/eval"),
            policies=("sft", "runs/programs/sft_bench", "rlcf", "runs/programs/ppo_bench"),
            curves=("runs/programs/ppo",),
            num_samples=4,
            ks=(1, 4),
            batch_size=256,
            max_query_length=160,
            response_length=128,
            timeout=3.0,
            workers=2,
        ),
    },
    "rlcf-tiny-bench": {
        "help": "fine-tuning any policy on the embedded problems with tests",
        "sft": dict(
            data=Path("runs/programs/bench"),
            rows="code",
            out=Path("runs/programs/ppo_bench"),
            model="runs/programs/ppo",
            seed=1,
            num_epochs=4,
            batch_size=16,
            lr=5e-5,  # a higher rate would undo what PPO learned
            warmup_steps=5,
            loss_on="response",
            max_query_length=160,
            max_response_length=128,
            temperature=0.6,
        ),
    },
    "bipolar_ramp": {"help": "RLCF section 6.3: BipolarRamp", "baselines": BASELINE},
    "coderl": {
        "help": "RLCF section 6.3: CodeRL",
        "baselines": BASELINE | dict(objective="coderl", out=Path("runs/rlcf/coderl"), localise=False),
    },
    "bipolar_ramp-tiny": {
        "help": "BipolarRamp on the embedded programs",
        "baselines": TINY_BASELINE | dict(out=Path("runs/programs/bipolar_ramp")),
    },
    "coderl-tiny": {
        "help": "CodeRL on the embedded programs",
        "baselines": TINY_BASELINE | dict(objective="coderl", out=Path("runs/programs/coderl"), localise=False),
    },
}


def with_policy(model: str, batch_size: int, root: Path) -> dict:
    """Return the recipe `rlcf` with another of the paper's policies, in separate directories."""
    rlcf = RECIPES["rlcf"]
    sft, discriminator, data, bench = root / "sft", root / "discriminator", root / "data", root / "bench"
    return {
        "help": f"RLCF with {model}",
        "sft": rlcf["sft"] | dict(model=model, batch_size=batch_size, data=data, out=sft),
        "discriminator": rlcf["discriminator"] | dict(sft=str(sft), data=data, out=discriminator),
        "rlcf": dict(sft=str(sft), discriminator=str(discriminator), data=data, out=root / "ppo"),
        "programs": rlcf["programs"]
        | dict(
            data=bench,
            out=root / "eval",
            policies=("sft", f"{root}/sft_bench", "rlcf", f"{root}/ppo_bench"),
            curves=(f"{root}/ppo",),
        ),
    }


RECIPES["rlcf-codet5"] = with_policy("Salesforce/codet5-large", 256, Path("runs/codet5"))  # 770M: 32 x 8
RECIPES["rlcf-codet5-base"] = with_policy("Salesforce/codet5-base", 64, Path("runs/codet5_base"))  # 220M: 8 x 8
RECIPES["rlcf-gpt2-xl"] = with_policy("openai-community/gpt2-xl", 32, Path("runs/gpt2_xl"))  # 1.5B: 4 x 8
RECIPES["rlcf-gpt2-xl"]["rlcf"]["value_model"] = "runs/gpt2_xl/critic"  # GPT-2 124M, trained on the same programs
# 768 tokens of the query and 256 of the response are GPT-2's 1,024 positions
RECIPES["rlcf-gpt2-xl"]["programs"] |= {"max_query_length": 768, "cut_queries": True}

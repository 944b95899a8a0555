# What the Makefile includes: `make lab`, `make compare` and `make mismatch`, experiments of many runs in one world.
# Each is a table that can be changed on the command line; what has run is not repeated.

# The laboratory is a table: FLAG/VALUE is a labeller of data.tiny, and the directory of its runs. A comma stands for a space.
# Of these a reward model is trained
LAB_LABELLERS ?= temperature/0.1 temperature/1.6 temperature/6.4 flip-rate/0.2 flip-rate/0.4 \
  num-comparisons/200 num-comparisons/6400 random-workers/3 random-workers/6
# of these also a policy
LAB_POLICIES ?= base length-bonus/0.3 length-bonus/0.6 summarisers/reference,good summarisers/terse,lead,rambler,repeater
# of these a policy against the reward model of LAB_BIASED: FLAG/VALUE is one of train_ppo.py. An ensemble takes two more
# reward models of the same labels
LAB_REMEDIES ?= kl-coef/0.2 ensemble/uncertainty
LAB_BIASED = length-bonus/0.6
# what the base is called where its dial is turned, and the biased one where a remedy is
LAB_BASE = temperature/0.4 flip-rate/0 num-comparisons/1600 random-workers/0 length-bonus/0 summarisers/all
LAB_UNTREATED = remedy/none

comma := ,
flags = $(if $(findstring /,$(1)),--$(subst $(comma), ,$(subst /, ,$(1))))
labels = test -f "$(LAB)/$(1)/data/tokenizer.json" || $(PY) -m data.tiny --out "$(LAB)/$(1)/data" --seed $(SEED) \
	  --num-comparisons 1600 --num-triads 100 $(call flags,$(1))
evaluation = test -f "$(1)/eval.json" || $(PY) eval.py $(2) --out "$(1)" --overwrite
# PPO and its evaluation in the directory of the first argument, with the labels and the reward model of the second, of
# which the fourth names more members
define policy
	$(call stage,$(LAB)/$(1)/ppo,train_ppo.py --data "$(LAB)/$(2)/data" --sft "$(LAB)/sft" \
	  --reward-model "$(LAB)/$(2)/rm" $(4:%="$(LAB)/$(2)/%") --total-episodes 1280 $(3))
	$(call evaluation,$(LAB)/$(1)/eval,tiny --data "$(LAB)/$(2)/data" --policies sft "$(LAB)/sft" ppo "$(LAB)/$(1)/ppo" \
	  --reward-model "$(LAB)/$(2)/rm" --num-queries 256 --seed $(SEED))
endef

# what has run is not repeated: the table can grow
lab: export OMP_NUM_THREADS = 1
lab: .venv
	$(MAKE) --jobs $(JOBS) $(LAB_REMEDIES:%=lab-remedy/%) $(LAB_POLICIES:%=lab-policy/%) $(LAB_LABELLERS:%=lab-labels/%)
	$(foreach point,$(LAB_BASE),mkdir -p "$(LAB)/$(dir $(point))" && ln -sfn ../base "$(LAB)/$(point)" &&) true
	$(foreach point,$(LAB_UNTREATED),mkdir -p "$(LAB)/$(dir $(point))" && ln -sfn "../$(LAB_BIASED)" "$(LAB)/$(point)" &&) true
	$(PY) -m nanorlhf.report.lab --runs "$(LAB)" --out "$(LAB)/report"

lab-sft: .venv
	$(call labels,base)
	$(call stage,$(LAB)/sft,train_sft.py --data "$(LAB)/base/data")

lab-labels/%: lab-sft
	$(call labels,$*)
	$(call stage,$(LAB)/$*/rm,train_rm.py --data "$(LAB)/$*/data" --sft "$(LAB)/sft" --num-epochs 2 \
	  --num-normalisation 512)
	$(call evaluation,$(LAB)/$*/eval_rm,tiny-rm --data "$(LAB)/$*/data" --reward-models rm "$(LAB)/$*/rm" \
	  --ref-policy "$(LAB)/sft")

lab-policy/%: lab-labels/%
	$(call policy,$*,$*)

lab-member/%: lab-labels/$(LAB_BIASED)
	$(call stage,$(LAB)/$(LAB_BIASED)/rm_$*,train_rm.py --data "$(LAB)/$(LAB_BIASED)/data" --sft "$(LAB)/sft" \
	  --num-epochs 2 --num-normalisation 512,$(SEED)$*)

$(filter lab-remedy/ensemble/%,$(LAB_REMEDIES:%=lab-remedy/%)): lab-member/2 lab-member/3

lab-remedy/%: lab-labels/$(LAB_BIASED)
	$(call policy,remedy/$(subst /,$(comma),$*),$(LAB_BIASED),$(call flags,$*),$(if $(filter ensemble/%,$*),rm_2 rm_3))

# The comparison is a table too. compare-NAME is the command of an algorithm, whose world is $(1), but for the two flags of
# the grid: the learning rate, and what keeps the policy near its start, which is leash-NAME, or COMPARE_LEASH
COMPARE_ALGORITHMS ?= ppo rloo grpo dr-grpo reinforce++ dpo rejection
COMPARE_SEEDS ?= 1 2 3 4
COMPARE_GRID_SEED ?= 5
COMPARE_LRS ?= lr/3e-4 lr/1e-3
COMPARE_LEASH ?= kl-coef/0.02 kl-coef/0.1
COMPARE_BEST_OF ?= 4 16 64
# 1,024 responses each; to DPO none, but as many steps as its comparisons give
on-policy = --data "$(1)/data" --sft "$(1)/sft" --reward-model "$(1)/rm" --total-episodes 1024
compare-ppo = train_ppo.py $(on-policy) --num-ppo-epochs 2
grouped = train_grpo.py $(on-policy) --num-epochs 2 --samples-per-query 4 --algorithm
compare-rloo = $(grouped) rloo
compare-grpo = $(grouped) grpo
compare-dr-grpo = $(grouped) dr_grpo
compare-reinforce++ = train_grpo.py $(on-policy) --num-epochs 2 --samples-per-query 1 --algorithm reinforce++
compare-dpo = train_dpo.py --data "$(1)/data" --sft "$(1)/sft"
leash-dpo = beta/0.02 beta/0.1
compare-rejection = train_sft.py --model "$(1)/sft" --data "$(1)/winners" --warmup-steps 0
leash-rejection = num-epochs/4 num-epochs/16

# FLAG/VALUE/FLAG/VALUE: the points of an algorithm's grid, and the name of one's directory
points = $(foreach lr,$(COMPARE_LRS),$(addprefix $(lr)/,$(or $(leash-$(1)),$(COMPARE_LEASH))))
rest = $(patsubst $(call word-of,1,$(1))/%,%,$(1))
word-of = $(word $(1),$(subst /, ,$(2)))
as-flags = --$(call word-of,1,$(1)) $(call word-of,2,$(1)) --$(call word-of,3,$(1)) $(call word-of,4,$(1))
GRID_WORLD = $(COMPARE)/$(COMPARE_GRID_SEED)
# policies of an evaluation at the temperature that they were trained at: how they answer, how they differ
compared = $(call evaluation,$(1)/eval,tiny --data "$(2)/data" --reward-model "$(2)/rm" --num-queries 128 \
	  --temperature 0.7 --num-distinct-samples 4 --seed $(3) --policies sft "$(2)/sft" $(4))

# five phases, each of whose runs go side by side: worlds, the grid, its best points, the runs, their evaluation
compare: export OMP_NUM_THREADS = 1
compare: .venv
	$(MAKE) --jobs $(JOBS) $(COMPARE_SEEDS:%=compare-world/%) compare-world/$(COMPARE_GRID_SEED)
	$(MAKE) --jobs $(JOBS) $(foreach name,$(COMPARE_ALGORITHMS),\
	  $(addprefix compare-point/$(name)/,$(call points,$(name))))
	$(MAKE) --jobs $(JOBS) $(COMPARE_ALGORITHMS:%=compare-best/%)
	$(MAKE) --jobs $(JOBS) $(foreach name,$(COMPARE_ALGORITHMS),$(COMPARE_SEEDS:%=compare-run/%/$(name)))
	$(MAKE) --jobs $(JOBS) $(COMPARE_SEEDS:%=compare-eval/%)
	$(PY) -m nanorlhf.report.compare --runs "$(COMPARE)" --out "$(COMPARE)/report"

compare-world/%: .venv
	test -f "$(COMPARE)/$*/data/tokenizer.json" || $(PY) -m data.tiny --out "$(COMPARE)/$*/data" --seed $* \
	  --num-comparisons 1600 --num-validation 512
	$(call stage,$(COMPARE)/$*/sft,train_sft.py --data "$(COMPARE)/$*/data" --num-epochs 1,$*)
	$(call stage,$(COMPARE)/$*/rm,train_rm.py --data "$(COMPARE)/$*/data" --sft "$(COMPARE)/$*/sft" --num-epochs 2 \
	  --num-normalisation 512,$*)
	test -f "$(COMPARE)/$*/winners/best_of.json" || $(PY) -m data.best_of --policy "$(COMPARE)/$*/sft" \
	  --reward-model "$(COMPARE)/$*/rm" --data "$(COMPARE)/$*/data" --out "$(COMPARE)/$*/winners" --num-queries 60 \
	  --num-validation-queries 4 --num-samples 16 --seed $* \
	  $$(test -f "$(COMPARE)/$*/winners/best_of.partial.jsonl" && echo --resume || echo --overwrite)

compare-point/%: .venv
	$(call stage,$(COMPARE)/grid/$*,$(call compare-$(call word-of,1,$*),$(GRID_WORLD)) \
	  $(call as-flags,$(call rest,$*)),$(COMPARE_GRID_SEED))

compare-best/%: .venv
	$(call compared,$(COMPARE)/grid/$*,$(GRID_WORLD),$(COMPARE_GRID_SEED),\
	  $(foreach point,$(call points,$*),"$(point)" "$(COMPARE)/grid/$*/$(point)"))
	mkdir -p "$(COMPARE)/grid/$*"
	test "$(COMPARE)/grid/$*/best" -nt "$(COMPARE)/grid/$*/eval/eval.json" || { \
	  $(PY) -m nanorlhf.report.compare --best "$(COMPARE)/grid/$*/eval" > "$(COMPARE)/grid/$*/best.new" && \
	  mv "$(COMPARE)/grid/$*/best.new" "$(COMPARE)/grid/$*/best"; }

compare-run/%: .venv
	$(call stage,$(COMPARE)/$*,$(call compare-$(call rest,$*),$(COMPARE)/$(call word-of,1,$*)) \
	  $$(cat "$(COMPARE)/grid/$(call rest,$*)/best"),$(call word-of,1,$*))

compare-eval/%: .venv
	$(call compared,$(COMPARE)/$*,$(COMPARE)/$*,$*,\
	  $(foreach name,$(COMPARE_ALGORITHMS),$(name) "$(COMPARE)/$*/$(name)") \
	  $(foreach n,$(COMPARE_BEST_OF),best-of-$(n) "best-of-$(n):$(COMPARE)/$*/sft"))

# Samplers that are not quite the policy, and how the update accounts for it: SAMPLER/CORRECTION, each a flag below.
# int8 needs a CPU with VNNI
MISMATCH_RUNS ?= exact/none bfloat16/none bfloat16/tis int8/none int8/tis stale/none stale/tis stale/ratio \
  top-p/none top-p/tis top-p/ratio
MISMATCH_SEEDS ?= 1 2 3
sampler_bfloat16 = --rollout-dtype bfloat16
sampler_int8 = --rollout-dtype int8
sampler_stale = --sync-every 8
sampler_top-p = --top-p 0.9
correction_tis = --importance-correction tis
correction_ratio = --rollout-logprobs sampler

# SAMPLER/CORRECTION/SEED
mismatch_names = $(foreach run,$(MISMATCH_RUNS),$(MISMATCH_SEEDS:%=$(run)/%))
mismatch_word = $(word $(2),$(subst /, ,$(1)))

# one policy and one reward model, the laboratory's base; the trained policies are judged alike, by exact samples
mismatch: export OMP_NUM_THREADS = 1
mismatch: .venv
	$(MAKE) LAB="$(MISMATCH)" lab-labels/base
	$(MAKE) --jobs $(JOBS) $(mismatch_names:%=mismatch-run/%)
	$(call evaluation,$(MISMATCH)/eval,tiny --data "$(MISMATCH)/base/data" --reward-model "$(MISMATCH)/base/rm" \
	  --num-queries 256 --num-report-samples 0 --seed $(SEED) --policies sft "$(MISMATCH)/sft" \
	  $(foreach name,$(mismatch_names),$(subst /,-,$(name)) "$(MISMATCH)/$(name)"))
	$(PY) -m nanorlhf.report.mismatch --runs "$(MISMATCH)" --out "$(MISMATCH)/report"

mismatch-run/%:
	$(call stage,$(MISMATCH)/$*,train_ppo.py --data "$(MISMATCH)/base/data" --sft "$(MISMATCH)/sft" \
	  --reward-model "$(MISMATCH)/base/rm" --total-episodes 1280 $(sampler_$(call mismatch_word,$*,1)) \
	  $(correction_$(call mismatch_word,$*,2)),$(call mismatch_word,$*,3))

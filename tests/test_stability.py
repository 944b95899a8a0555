"""docs/stability.md: what 1.0.0 has written is read, and the names that it lists are there.

tests/v1/ holds what 1.0.0 wrote, and is not made again: data, an SFT run, and a PPO run that Ctrl-C stopped after its
second update. It was made in an empty directory by

    python -m data.sums --out . --num-demonstrations 32 --num-queries 8 --num-comparisons 8 --num-validation 4
    python train_sft.py sums --data short --out sft --d-model 8 --n-layer 1 --num-epochs 1 --save-every 500
    python train_ppo.py sums --data long --sft sft --out ppo --total-episodes 24 --batch-size 8 --trace 1
"""

"""A worked example and a common mistake for each exercise: tests run the examples against the solutions."""

SETTING = """\
import math
import numpy as np
import torch
from torch import tensor
from nanorlhf.dataset import Comparison, Demonstration, Scored
from nanorlhf.doctor.world import small_config
from nanorlhf.grpo import Inputs
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.ppo import KLCoefficient
uniform = GPT(small_config(8)).requires_grad_(False)
uniform.lm_head.weight.zero_()
constant = ScalarModel(small_config(8)).requires_grad_(False)
constant.score.weight.zero_()
constant.score.bias.fill_(0.5)
"""
MODELS = {
    "uniform": "`uniform` is a policy that gives each of 8 ids the same probability.",
    "constant": "`constant` is a reward or value model that outputs 0.5 at every token.",
}

EXAMPLES: dict[str, tuple[str, str]] = {
    "padding": (
        """\
>>> first_true_index(tensor([[False, True, True], [False, False, False]]))  # T = 3 if none is True
tensor([1, 3])
""",
        "Returning 0 for a row without a True, as argmax does.",
    ),
    "positions": (
        """\
>>> position_ids(tensor([[False, False, True, True, True]]))
tensor([[0, 0, 0, 1, 2]])
""",
        "Starting at 1, or counting columns instead of real tokens.",
    ),
    "attention-mask": (
        """\
>>> attention_mask(tensor([[False, True, True]]), window=None).int()[0, 0]  # a row per query; column 0 is padding
tensor([[1, 0, 0],
        [0, 1, 0],
        [0, 1, 1]], dtype=torch.int32)
>>> attention_mask(tensor([[True, True, True]]), window=2).int()[0, 0]
tensor([[1, 0, 0],
        [1, 1, 0],
        [0, 1, 1]], dtype=torch.int32)
""",
        "Hiding the diagonal at padding: its softmax over nothing is NaN, which spreads through later layers.",
    ),
    "rotary-positions": (
        """\
>>> qkv = tensor([[[[1.0, 0.0]], [[0.0, 2.0]], [[5.0, 6.0]]]]).view(1, 1, 3, 2)  # one head: q, k, v
>>> cos, sin = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1)  # a quarter turn: 1 -> i, 2i -> -2; v stays
>>> apply_rotary_(qkv, cos, sin, n_head=1, interleaved=True)
tensor([[[[ 0.,  1.],
          [-2.,  0.],
          [ 5.,  6.]]]])
""",
        "Computing the second half of a pair from the first half's new value.",
    ),
    "sampling": (
        """\
>>> p = tensor([[0.2, 0.0, 0.5, 0.3]])  # cumulative: 0.2, 0.2, 0.7, 1.0
>>> [draw(p, tensor([[u]])).item() for u in (0.0, 0.19, 0.2, 0.69, 0.71)]
[0, 0, 2, 2, 3]
""",
        "At u = 0.2 the cumulative sum must exceed u: id 1, with probability 0, is never drawn.",
    ),
    "top-k-and-top-p": (
        """\
>>> logits = tensor([[0.1, 0.4, 0.2, 0.3]]).log()
>>> keep_top_k(logits, 2).exp()
tensor([[0.0000, 0.4000, 0.0000, 0.3000]])
>>> keep_top_p(logits, 0.6).exp()  # 0.4 doesn't reach 0.6, 0.4 + 0.3 does
tensor([[0.0000, 0.4000, 0.0000, 0.3000]])
""",
        "Dropping the id that crosses p: the kept ids then have less than p in total.",
    ),
    "kv-cache": (
        """\
>>> q, k = tensor([[[[1.0, 0.0]]]]), tensor([[[[0.0, 0.0], [math.log(3), 0.0]]]])  # logits 0 and log 3
>>> v = tensor([[[[4.0, 0.0], [8.0, 0.0]]]])
>>> attend_one(q, k, v, torch.zeros(1, 1, 1, 2), scale=1.0)  # weights 1/4 and 3/4: 4 / 4 + 8 * 3 / 4
tensor([[[[7.0000, 0.0000]]]])
""",
        "Returning the whole buffer on a CPU: columns that aren't written yet contain anything.",
    ),
    "repeated-ngrams": (
        """\
>>> ban_repeated_ngrams(torch.zeros(1, 4), tensor([[1, 2, 3, 1, 2]]), n=3)  # 1 2 was followed by 3
tensor([[0., 0., 0., -inf]])
""",
        "Banning every id that occurred, or treating -1 (padding) as an id.",
    ),
    "leading-blank": (
        """\
>>> with_leading_space("TL;DR:", "a cat")
' a cat'
>>> with_leading_space("TL;DR:\\n", "a cat")
'a cat'
""",
        "Adding a second blank to a response that has one.",
    ),
    "truncation": (
        """\
>>> truncate("One. Two!\\nThree.", lambda n: n <= 10)
('One. Two!', 'paragraph')
>>> truncate("One. Two!\\nThree.", lambda n: n <= 6)
('One.', 'sentence')
""",
        "Cutting at the nearest newline only, although the post may have to lose several paragraphs.",
    ),
    "batches": (
        """\
>>> [batch_indices(num_rows=5, batch_size=2, step=i, seed=0) for i in range(5)]  # ten indices: two epochs
[[2, 4], [3, 0], [1, 1], [4, 3], [0, 2]]
""",
        "Dropping the last, incomplete batch of an epoch instead of filling it from the next one.",
    ),
    "learning-rate": (
        """\
>>> [lr_factor("linear", step, num_steps=4) for step in range(4)]
[1.0, 0.75, 0.5, 0.25]
>>> [lr_factor("linear", step, num_steps=6, warmup_steps=2) for step in range(6)]
[0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
""",
        "Reaching 0 before the last step, or warming up from 0, so that the first step does nothing.",
    ),
    "sft-loss": (
        """\
>>> row = Demonstration(query=[2, 3], response=[4, 5, 1], record={})  # three labels, EOS among them
>>> loss = demonstration_loss(uniform, [row], pad_id=0, loss_on="response")  # probability 1/8 each
>>> round(loss.item(), 4), round(3 * math.log(8), 4)
(6.2383, 6.2383)
""",
        "Averaging over rows first: short texts then count more per token.",
    ),
    "ranks": (
        """\
>>> rank_slice(8)  # a single process; with two ranks, rank 1 has slice(4, 8)
slice(0, 8, None)
""",
        "Slices that overlap, or averaging gradients that were already divided by the global count.",
    ),
    "micro-batches": (
        """\
>>> model = torch.nn.Linear(1, 1, bias=False)
>>> losses = lambda model, rows: (model(tensor(rows)[:, None]).sum(),)  # of row x: w * x
>>> _ = backward(model, [1.0, 2.0, 6.0], losses, count=3, micro_batch_size=2, dtype="float32")
>>> model.weight.grad  # (1 + 2 + 6) / 3, whatever the micro-batches
tensor([[3.]])
""",
        "Dividing by the size of each micro-batch: a smaller last one then counts too much.",
    ),
    "scalar-head": (
        """\
>>> head = ScalarModel(small_config(8)).score  # d_model is 16: a standard deviation of 1 / sqrt(17) = 0.24
>>> head.weight.shape, head.bias.item()
(torch.Size([1, 16]), 0.0)
""",
        "Keeping PyTorch's default, a uniform distribution with half this width.",
    ),
    "reward-at-eos": (
        """\
>>> rows = tensor([[0, 0, 5, 6, 7, 8, 1, 0], [4, 4, 5, 6, 7, 7, 7, 7]])  # Q = 4; [PAD] is 0, EOS is 1
>>> end_index(rows, 4, pad_id=0)
tensor([6, 7])
""",
        "Searching for [PAD] from column 0: a left-padded query begins with it.",
    ),
    "pairwise-loss": (
        """\
>>> row = Comparison(query=[2], chosen=[3, 1], rejected=[4, 1], record={})
>>> loss, correct, margin = contrastive_loss(constant, [row], pad_id=0)  # a model that scores everything 0.5
>>> round(loss.item(), 4), correct.item(), margin.item()  # log 2; a tie isn't correct
(0.6931, 0, 0.0)
""",
        "-log(sigmoid(margin)) is inf at a margin of -200; logsigmoid isn't.",
    ),
    "regression-loss": (
        """\
>>> row = Scored(query=[2], response=[3, 1], record={"score": -0.25})
>>> [x.item() for x in regression_loss(constant, [row], pad_id=0)]  # 0.75 squared, other signs, 0.75
[0.5625, 0, 0.75]
""",
        "Reading the score before EOS instead of at EOS.",
    ),
    "normalisation": (
        """\
>>> row = Demonstration(query=[2], response=[3, 1], record={})
>>> normalise(constant, [row], 0, 1, "float32", shift=True)  # mean and standard deviation before
(0.5, 0.0)
>>> constant.reward_bias
tensor(0.5000)
""",
        "Subtracting the mean a second time from a model that was already shifted, or adding it.",
    ),
    "eos-masks": (
        """\
>>> eos, actions, states = eos_masks(tensor([[5, 6, 1, 7, 0], [5, 6, 7, 8, 9]]), eos_id=1, pad_id=0)
>>> eos, actions.int(), states.int()
(tensor([2, 4]), tensor([[1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1]], dtype=torch.int32), tensor([[1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1]], dtype=torch.int32))
""",
        "Ending the states at EOS: the finished response, the state that gets the score, then has no value.",
    ),
    "response-logprobs": (
        """\
>>> ids, real = tensor([[2, 3, 4, 1]]), torch.ones(1, 4).bool()  # Q = 2, T = 2
>>> logprobs, entropy = response_logprobs(uniform, ids, real, real[:, 2:], temperature=0.7)
>>> logprobs, entropy  # -log 8 and log 8 at any temperature, because all logits are equal
(tensor([[-2.0794, -2.0794]]), tensor([[2.0794, 2.0794]]))
""",
        "An index off by one: the output at a token predicts the next token.",
    ),
    "dpo-loss": (
        """\
>>> margin_loss(tensor([0.0, 2.0]), beta=0.1, loss="sigmoid", label_smoothing=0.0)  # log 2, log(1 + exp(-2))
tensor([0.6931, 0.1269])
>>> margin_loss(tensor([0.0, 2.0]), beta=0.1, loss="ipo", label_smoothing=0.0)  # (m / 0.1 - 5)^2
tensor([ 25., 225.])
""",
        "The margin contains beta already; multiplying by it again changes the loss.",
    ),
    "dpo-logprobs": (
        """\
>>> summed_logprobs(uniform, [[2, 3], [2]], [[4, 1], [4, 5, 1]], pad_id=0) / math.log(8)
tensor([-2., -3.])
""",
        "Taking the mean over tokens: DPO uses the log-probability of the whole response.",
    ),
    "policy-gradient": (
        """\
>>> logits = tensor([0.5, 0.25, 0.25]).double().log()
>>> probabilities(logits)  # E, xE, yE, xx, xy, yx, yy
tensor([0.5000, 0.1250, 0.1250, 0.0625, 0.0625, 0.0625, 0.0625],
       dtype=torch.float64)
>>> reinforce(logits)[0]  # score 0.3: 0.3 * (1 - 0.5), 0.3 * -0.25, 0.3 * -0.25
tensor([ 0.1500, -0.0750, -0.0750], dtype=torch.float64)
>>> probabilities(logits) @ reinforce(logits, baseline=5.0)  # the exact gradient, with any baseline
tensor([-0.0125,  0.0750, -0.0625], dtype=torch.float64)
""",
        "Forgetting -p_j: raising one token's logit lowers the probability of the others.",
    ),
    "kl-estimators": (
        """\
>>> p, q = tensor([0.5]).log(), tensor([0.25]).log()  # x = log 2
>>> [round(k(p, q).item(), 4) for k in (k1, k2, k3)]  # log 2, (log 2)^2 / 2, 1/2 - 1 + log 2
[0.6931, 0.2402, 0.1931]
""",
        "Swapping the policies in k3, which then estimates another divergence.",
    ),
    "exact-kl": (
        """\
>>> logits, ref_logits = tensor([[0.75, 0.25, 0.0]]).log(), tensor([[0.5, 0.5, 0.0]]).log()
>>> stored_kl_divergence(logits, ref_logits)  # 0.75 log 1.5 + 0.25 log 0.5
tensor([0.1308])
""",
        "0 * log 0 is NaN in floating point; torch.where must replace the factor before the product.",
    ),
    "whitening": (
        """\
>>> x, mask = tensor([[1.0, 3.0, 100.0]]), tensor([[True, True, False]])
>>> masked_mean(x, mask), whiten(x, mask), whiten(x, mask, shift_mean=False)  # mean 2, variance 1
(tensor(2.), tensor([[-1.,  1.,  0.]]), tensor([[1., 3., 0.]]))
""",
        "x * mask keeps NaN: 0 * NaN is NaN. And var() divides by n - 1 by default.",
    ),
    "token-rewards": (
        """\
>>> one = {"actions": tensor([[True, True, False]]), "logprobs": tensor([[-1.0, -2.0, 0.0]])}
>>> one |= {"ref_logprobs": tensor([[-1.5, -1.0, 0.0]]), "token_rewards": torch.zeros(1, 3)}
>>> one |= {"scores": tensor([2.0]), "score_index": tensor([2])}
>>> unwhitened_rewards(one, kl_coef=0.1)  # -0.1 * 0.5, -0.1 * -1, and the score
tensor([[-0.0500,  0.1000,  2.0000]])
""",
        "Assigning the score instead of adding it: the KL penalty of that token is lost.",
    ),
    "gae-loop": (
        """\
>>> rewards, values = tensor([[0.0, 0.0, 1.0]]), tensor([[0.5, 0.6, 0.8]])
>>> gae_loop(rewards, values, gamma=1.0, lam=0.5)  # from the right: 1 - 0.8; 0.8 - 0.6 + 0.5 * 0.2; ...
(tensor([[0.2500, 0.3000, 0.2000]]), tensor([[0.7500, 0.9000, 1.0000]]))
""",
        "Computing returns from whitened advantages: returns = advantages + values, before whitening.",
    ),
    "gae-terms": (
        """\
>>> rewards, values = tensor([[0.0, 0.0, 1.0]]), tensor([[0.5, 0.6, 0.8]])
>>> advantages, states = tensor([[0.25, 0.3, 0.2]]), torch.ones(1, 3).bool()  # of gae-loop, lam = 0.5
>>> gae_terms(rewards, values, advantages, states, gamma=1.0, lam=0.5)  # their sum is A
(tensor([[0.1000, 0.2000, 0.2000]]), tensor([[0.1500, 0.1000, 0.0000]]))
""",
        "Reading values after the last state, which mean nothing.",
    ),
    "gae-scan": (
        """\
>>> rewards, values = tensor([[0.0, 0.0, 1.0]]), tensor([[0.5, 0.6, 0.8]])
>>> gae_doubling(rewards, values, gamma=1.0, lam=0.5)  # as gae-loop, in log2(T) rounds
(tensor([[0.2500, 0.3000, 0.2000]]), tensor([[0.7500, 0.9000, 1.0000]]))
""",
        "Discounting each round by gamma * lam: a round that reaches 2^k steps discounts by (gamma * lam)^(2^k).",
    ),
    "policy-loss": (
        """\
>>> new, old = tensor([[1.0, 2.0, 0.5]]).log(), torch.zeros(1, 3)  # ratios 1, 2, 0.5
>>> losses, clipped = policy_loss(new, old, tensor([[1.0, 1.0, -2.0]]), torch.ones(1, 3).bool(), 0.2)
>>> losses, clipped  # -1; max(-2, -1.2); max(1, 1.6)
(tensor([[-1.0000, -1.2000,  1.6000]]), tensor([[False,  True,  True]]))
""",
        "The minimum of two losses instead of the maximum: the minimum belongs to the objective, which is -loss.",
    ),
    "gradient-sign": (
        """\
>>> advantages, ratio = tensor([[1.0, 1.0, -2.0, -2.0]]), tensor([[1.1, 1.3, 1.3, 0.7]])
>>> policy_push(advantages, ratio, 0.2)  # A * ratio, or 0 where the clipped term decides
tensor([[ 1.1000,  0.0000, -2.6000,  0.0000]])
""",
        "Clipping both signs at both ends: a bad token that became more likely still has a gradient.",
    ),
    "value-loss": (
        """\
>>> new, old, returns = tensor([[0.5, 1.0]]), tensor([[0.0, 0.0]]), tensor([[1.0, 1.0]])
>>> losses, clipped = value_loss(new, old, returns, torch.ones(1, 2).bool(), clip_range=0.2)
>>> losses, clipped  # clipped to 0.2: 0.5 * 0.8^2 both times
(tensor([[0.3200, 0.3200]]), tensor([[True, True]]))
""",
        "Clipping around the returns instead of around the rollout's values.",
    ),
    "values": (
        """\
>>> ids, real = tensor([[2, 3, 4, 1]]), torch.ones(1, 4).bool()  # Q = 2, T = 2
>>> response_values(constant, ids, real, tensor([[True, False]]))  # a model that outputs 0.5 everywhere
tensor([[0.5000, 0.0000]])
""",
        "Reading the output at the token itself: the value is the expectation before the token.",
    ),
    "adaptive-kl": (
        """\
>>> beta = KLCoefficient(0.2, target=6.0, horizon=100)
>>> beta.update(kl=12.0, num_episodes=10)  # the error, 1, is clipped to 0.2
>>> round(beta.value, 4)
0.204
""",
        "Using kl - target instead of kl / target - 1.",
    ),
    "one-page": (
        """\
>>> batch = {"actions": tensor([[True, True, False]]), "kl": tensor([[0.5, -1.0, 0.0]])}
>>> rewards = -0.1 * batch["kl"]
>>> rewards[0, 2] += 2.0  # EOS is the second token: the score is added in the state after it
>>> rewards
tensor([[-0.0500,  0.1000,  2.0000]])
""",
        "Adding the score at every token, or reading it where the query ends.",
    ),
    "group-advantages": (
        """\
>>> scores, zeros = tensor([1.0, 3.0, 0.0, 0.0]), torch.zeros(4, 2)  # two queries with two responses each
>>> x = Inputs(scores, zeros, zeros, torch.ones(4, 2).bool(), k=2, kl_coef=0.0, gamma=1.0)
>>> [algorithm(x)[:, 0].tolist() for algorithm in (grpo, dr_grpo, rloo)]
[[-1.0, 1.0, 0.0, 0.0], [-1.0, 1.0, 0.0, 0.0], [-2.0, 2.0, 0.0, 0.0]]
""",
        "A standard deviation that divides by k - 1, or groups of rows that aren't adjacent.",
    ),
    "vote-regression": (
        """\
>>> regression_scores([[4.0, 0.0], [-2.0, 1.0]])  # votes per answer: 2, 0, -1, 0.5; largest inliers 2 and -1
[[1.0, 0.0], [-1.0, 0.25]]
""",
        "Taking the fences from all splits: validation must not set the scale.",
    ),
    "vote-contrast": (
        """\
>>> contrastive_scores([-2, 0, 3, 4], [True, False, True, False])  # ceil(log2(1 + 4)) is 3
[-1, 0, 3, 3]
""",
        "Adding the accepted answer's 1 also to negative votes.",
    ),
    "metric-at-k": (
        """\
>>> metric_at_k([[1.0, 2.0, 3.0]], k=2)  # best of two of three: 3 in two of the three pairs, 2 in one
2.6666666666666665
>>> mrr_at_k([[0.9, 0.1, 0.5]], [[0, 0, 1]], k=3)  # the useful answer is second
0.5
""",
        "Sorting in descending order, or counting ranks from 0.",
    ),
    "pass-at-k": (
        """\
>>> pass_at_k(n=4, c=1, k=2)  # 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6
0.5
""",
        "1 - (1 - c / n)^k draws with replacement and is biased.",
    ),
    "text-rank": (
        """\
>>> similarity = np.array([[1.0, 0.9, 0.9], [0.9, 1.0, 0.1], [0.9, 0.1, 1.0]])
>>> text_rank(similarity).round(2)  # the first is close to both others; the weights sum to 3
array([1.39, 0.81, 0.81])
""",
        "Normalising by the receiver's edges instead of the voter's.",
    ),
    "isodata": (
        """\
>>> points = np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.0, 1.0]])
>>> merge(points, np.array([0, 1, 2, 2]))  # clusters of one merge with the nearest
array([0, 0, 1, 1])
>>> split(points, np.array([0, 0, 1, 1]))  # the first is too wide; equal vectors stay together
array([0, 1, 2, 2])
""",
        "Merging a cluster twice in one pass.",
    ),
    "localisation": (
        """\
>>> ends = character_ends([7, 8, 9], {7: b" s", 8: b"+=", 9: b"1"})
>>> ends, error_token(ends, offset=3)  # the second = is completed by token 1
([2, 4, 5], 1)
""",
        "Counting bytes instead of characters: an emoji has four bytes and may take two tokens.",
    ),
    "discriminator": (
        """\
>>> first, second = tensor([True, True, False, False]), tensor([True, False, True, False])
>>> grounding(first, second, torch.full((4,), 0.3))  # the discriminator decides only the first
tensor([ 0.3000,  1.0000, -1.0000,  0.0000])
""",
        "A D that depends on the order: D(x, y0, y1) must be -D(x, y1, y0).",
    ),
    "triplet-loss": (
        """\
>>> anchors, positives = tensor([[0.0, 0.0], [3.0, 0.0]]), tensor([[1.0, 0.0], [3.0, 1.0]])
>>> loss, correct = triplet_loss(anchors, positives, tensor([0, 1]), margin=5.0)
>>> loss, correct  # row 0: max(0, 1 - 9 + 5); row 1: max(0, 1 - 4 + 5), as (1, 0) is nearest to (3, 0)
(tensor(2.), tensor(2))
""",
        "Taking a negative that solves the same problem.",
    ),
    "log-softmax": (
        """\
>>> logits = tensor([[0.5, 0.25, 0.25]]).log()
>>> stored_logprobs(logits, tensor([0]))  # log 0.5; the entropy is 1.5 log 2
(tensor([-0.6931]), tensor([1.0397]))
""",
        "exp overflows for large logits: subtract the maximum, or use log_softmax.",
    ),
    "gae-kernel": (
        """\
>>> rewards, values = tensor([[0.0, 0.0, 1.0]]), tensor([[0.5, 0.6, 0.8]])
>>> gae_doubling(rewards, values, gamma=1.0, lam=0.5)[0]  # a program of the kernel writes this row
tensor([[0.2500, 0.3000, 0.2000]])
""",
        "Starting the scan with rows beyond T that aren't masked.",
    ),
}
"""name -> (example in the format of doctest, mistake)"""

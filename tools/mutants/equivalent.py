"""Mutants that no test can kill, because they do the same as the function, or the same on a CPU.

`python -m tools.mutants` excludes them from the shares, and reports any that a test kills after all.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Equivalent:
    function: str
    """module:name"""
    changes: tuple[str, ...]
    """the mutated statements, as in `operators.Mutant.change`"""
    why: str


ONE_DIMENSION = "The tensor has one dimension: 0 and -1 are the same."
TWO_DIMENSIONS = "The tensor has two dimensions: 1 and -1 are the same."

EQUIVALENT: tuple[Equivalent, ...] = (
    Equivalent(
        function="nanorlhf.masks:position_ids",
        changes=("return (mask.cumsum(1) - 1).masked_fill(~mask, 0)",),
        why="PyTorch adds up bools in int64 anyway.",
    ),
    Equivalent(
        function="nanorlhf.masks:attention_mask",
        changes=(
            "visible = key < query if causal else torch.ones_like(key == query)",
            "visible = key <= query if causal else torch.ones_like(key != query)",
        ),
        why="The last line lets every token attend to itself; ones_like uses only the shape of its argument.",
    ),
    Equivalent(
        function="kernels.attention:apply_rotary_",
        changes=("qk = qkv[:, :, :(n_head - qkv.size(2)) // 2, :2 * cos.size(-1)]",),
        why="(H - (H + 2K)) / 2 is -K: all but the last K heads are the first H + K.",
    ),
    Equivalent(
        function="kernels.attention:apply_rotary_",
        changes=(
            "a, b = (qk[..., ::2], qk[..., 1::2]) if interleaved else qk.chunk(2, dim=-1)",
            "a, b = (qk[..., 0:-1:2], qk[..., 1::2]) if interleaved else qk.chunk(2, dim=-1)",
        ),
        why="The number of channels is even, so the last index is odd.",
    ),
    Equivalent(
        function="nanorlhf.generate:draw",
        changes=(
            "cumulative = probabilities.cumsum(1, dtype=dtype)",
            "token = token.clamp(max=probabilities.size(1) - 1)",
            "best = probabilities.argmax(1, keepdim=True)",
        ),
        why=TWO_DIMENSIONS,
    ),
    Equivalent(
        function="nanorlhf.generate:keep_top_k",
        changes=(
            "if k <= 0 or k >= logits.size(1):",
            "threshold = logits.topk(k, dim=1).values[:, -1:]",
            "threshold = logits.topk(k).values[:, -1:]",
        ),
        why=TWO_DIMENSIONS,
    ),
    Equivalent(
        function="nanorlhf.generate:keep_top_k",
        changes=("if k <= 0 or k > logits.size(-1):",),
        why="With k = V the smallest logit is the threshold, and no logit is below it.",
    ),
    Equivalent(
        function="nanorlhf.generate:keep_top_p",
        changes=(
            "probabilities = sorted_logits.softmax(1)",
            "before = probabilities.cumsum(1) - probabilities",
        ),
        why=TWO_DIMENSIONS,
    ),
    Equivalent(
        function="nanorlhf.generate:keep_top_p",
        changes=(
            "sorted_logits, order = logits.sort(descending=True)",
            "sorted_logits, order = logits.sort(descending=True, stable=False)",
        ),
        why="On a CPU every sort of PyTorch is stable.",
    ),
    Equivalent(
        function="nanorlhf.cache:KVCache.append",
        changes=(
            "keys, values = (self.keys[layer - 1], self.values[layer])",
            "keys, values = (self.keys[layer], self.values[layer - 1])",
        ),
        why="Each layer still has its own slot: layer 0 gets the last one.",
    ),
    Equivalent(
        function="nanorlhf.metrics.at_k:pass_at_k",
        changes=("if n < k:", "if n + c < k:", "pass  # return 1.0"),
        why="With fewer failures than draws, one factor is 1 - k / k = 0, so the result is 1.",
    ),
    Equivalent(
        function="nanorlhf.generate:ban_repeated_ngrams",
        changes=("exhausted = (result == -torch.inf).all(1, keepdim=True)",),
        why=TWO_DIMENSIONS,
    ),
    Equivalent(
        function="data.tldr:truncate",
        changes=("paragraphs = [i for i in range(first + 1, len(text)) if text[i] == '\\n']",),
        why="`first` is the position of the first non-whitespace character, so it isn't a newline.",
    ),
    Equivalent(
        function="data.tldr:truncate",
        changes=(
            "first_paragraph = text[:paragraphs[0] + 1] if paragraphs else text",
            "characters = range(first + 1, len(first_paragraph) + 1)",
        ),
        why="It adds one cut position, the end of the first paragraph, which didn't fit in the previous step.",
    ),
    Equivalent(
        function="train_sft:demonstration_loss",
        changes=("first = query_length if loss_on == 'response' else torch.zeros_like(query_length)",),
        why="The first token is never a label.",
    ),
    Equivalent(
        function="nanorlhf.doctor.seven:probabilities",
        changes=("logprobs = logits.log_softmax(-1)",),
        why=ONE_DIMENSION,
    ),
    Equivalent(
        function="nanorlhf.doctor.seven:reinforce",
        changes=("token_probabilities = logits.softmax(-1)",),
        why=ONE_DIMENSION,
    ),
    Equivalent(
        function="train_rm:regression_loss",
        changes=("error = targets - scores",),
        why="Only its square and its absolute value are used.",
    ),
    Equivalent(
        function="kernels.gae:gae_doubling",
        changes=("while step <= rewards.size(1) and decay > 0:",),
        why="A round with step = T adds nothing, because no position has another one T steps ahead.",
    ),
    Equivalent(
        function="data.stackoverflow:regression_scores",
        changes=("largest = bounds.largest_positive if share >= 0 else bounds.largest_negative",),
        why="0 divided by either is 0.",
    ),
    Equivalent(
        function="nanorlhf.metrics.at_k:mrr_at_k",
        changes=("ranked = np.take_along_axis(labels, order)[:, :k] > 0",),
        why="Since NumPy 2.3 the default is the last axis; before, the argument is required.",
    ),
    Equivalent(
        function="nanorlhf.selfrank.text_rank:text_rank",
        changes=(
            "if np.abs(before).max() < tolerance:",
            "if np.abs(weights).max() < tolerance:",
            "if np.abs(weights + before).max() < tolerance:",
            "pass  # break",
        ),
        why="All passes run, and those after convergence change no digit that matters.",
    ),
    Equivalent(
        function="nanorlhf.selfrank.text_rank:text_rank",
        changes=("if (weights - before).max() < tolerance:",),
        why="A pass keeps the sum of the weights: if none rises by the tolerance, none falls by m times as much.",
    ),
    Equivalent(
        function="nanorlhf.selfrank.text_rank:text_rank",
        changes=(
            "if np.abs(weights - before).max() <= tolerance:",
            "if np.abs(before - weights).max() < tolerance:",
        ),
        why="One pass more or less at the tolerance changes no digit that matters; abs removes the sign.",
    ),
    Equivalent(
        function="nanorlhf.selfrank.text_rank:text_rank",
        changes=("shares = (edges / np.where(given > 0, given, 2)[:, None]).T",),
        why="0 divided by either is 0.",
    ),
    Equivalent(
        function="nanorlhf.selfrank.isodata:split",
        changes=(
            "distances = squared_distances(points[members], centroid[None])[:, -1]",
            "equal = squared_distances(points[members], farthest[None])[:, -1] == 0",
        ),
        why="There is one column.",
    ),
    Equivalent(
        function="nanorlhf.selfrank.isodata:split",
        changes=(
            "if (len(members) >= max_size or too_wide) and distances.max() >= 0:",
            "if (len(members) >= max_size or too_wide) and distances.max() > -1:",
            "if len(members) >= max_size or too_wide:",
        ),
        why="Equal members leave their cluster together, which only changes its number; in_order restores it.",
    ),
    Equivalent(
        function="nanorlhf.selfrank.isodata:split",
        changes=("if (len(members) >= max_size or too_wide) and distances.min() > 0:",),
        why="The mean of different vectors of length 1 is shorter than 1, so none of them equals it.",
    ),
    Equivalent(
        function="nanorlhf.selfrank.isodata:split",
        changes=(
            "equal = squared_distances(points[members], farthest[None])[:, 0] != 0",
            "result[members[equal]] = result.max() + 2",
        ),
        why="The same two clusters with other numbers; in_order restores them.",
    ),
    Equivalent(
        function="nanorlhf.selfrank.isodata:merge",
        changes=("for cluster, nearest in enumerate(between.argmin(0)):",),
        why="Distances are symmetric.",
    ),
    Equivalent(
        function="nanorlhf.selfrank.isodata:merge",
        changes=(
            "if sizes[cluster] <= limits.min_size and (not merged & {cluster, nearest}):",
            "if sizes[cluster] <= limits.min_size and len(sizes) >= 1 and (not merged & {cluster, nearest}):",
            "if sizes[cluster] <= limits.min_size and len(sizes) > 0 and (not merged & {cluster, nearest}):",
        ),
        why="A single cluster's nearest neighbour is itself, and merging the two changes nothing.",
    ),
    Equivalent(
        function="nanorlhf.rlcf.discriminator:triplet_loss",
        changes=("return (loss.sum(), (near < far).sum())",),
        why="Without a negative, `far` is 0, and nothing is nearer than that.",
    ),
    Equivalent(
        function="nanorlhf.rlcf.discriminator:triplet_loss",
        changes=(
            "far, near = (nearest, (anchors - positives).square().sum(1))",
            "far, near = (nearest.masked_fill(~has_negative, 1.0), (anchors - positives).square().sum(1))",
        ),
        why="Without a negative, both results ignore `far`, and so does the gradient.",
    ),
    Equivalent(
        function="nanorlhf.rlcf.discriminator:triplet_loss",
        changes=("far, near = (nearest.masked_fill(~has_negative, 0.0), (positives - anchors).square().sum(1))",),
        why="The square removes the sign.",
    ),
    Equivalent(
        function="kernels.logprobs:stored_logprobs",
        changes=("finite = logits.masked_fill(logits == -torch.inf, 1.0)",),
        why="Its probability is 0, so any finite number works.",
    ),
    Equivalent(
        function="nanorlhf.reward_model:end_scores",
        changes=("first = torch.as_tensor(query_length).min() - 1",),
        why="An integer tensor with one element works like a number.",
    ),
    Equivalent(
        function="train_rm:normalise",
        changes=("scores = [torch.ones(0, device=device)]", "scores = [torch.zeros(1, device=device)]"),
        why="Neither an empty tensor nor a 0 changes the sum or the sum of squares.",
    ),
    Equivalent(
        function="train_rm:normalise",
        changes=("scores.append(response_scores(full, list(some), pad_id, 'left!'))",),
        why="Any value except 'left' pads on the right, which changes no score [N+ 14].",
    ),
    Equivalent(
        function="nanorlhf.ppo:eos_masks",
        changes=(
            "eos_index = torch.minimum(first_eos, first_pad - 1).clamp(min=0)",
            "eos_index = torch.minimum(first_eos, first_pad - 1).clamp(min=0, max=T + 1)",
            "eos_index = torch.minimum(first_eos, first_pad - 1).clamp(min=0, max=T)",
            "eos_index = torch.minimum(first_eos, first_pad - 1).clamp(min=0, max=T - 0)",
        ),
        why="A search without a match returns T, and the one for [PAD] is reduced by 1, so no end is beyond T - 1.",
    ),
    Equivalent(
        function="kernels.kl:stored_kl_divergence",
        changes=(
            "ratio = torch.where(possible, log_p, 1.0) - torch.where(possible, log_q, 0.0)",
            "ratio = torch.where(possible, log_p, 0.0) - torch.where(possible, log_q, 1.0)",
        ),
        why="The other factor is p = 0, so any finite number works.",
    ),
    Equivalent(
        function="kernels.gae:gae_loop",
        changes=("advantages = torch.ones_like(rewards)",),
        why="Every column is written.",
    ),
    Equivalent(
        function="kernels.gae:gae_doubling",
        changes=(
            "while step < rewards.size(1):",
            "while step < rewards.size(1) and decay >= 0:",
            "while step < rewards.size(1) and decay > -1:",
        ),
        why="Rounds with a decay of 0 add nothing.",
    ),
    Equivalent(
        function="nanorlhf.ppo:policy_loss",
        changes=("log_ratio = torch.where(actions, new_logprobs - logprobs, 1.0)",),
        why="The advantage is 0 there, so any finite ratio works.",
    ),
    Equivalent(
        function="nanorlhf.report.microscope:policy_push",
        changes=("is_clipped = torch.where(advantages >= 0, ratio > most, ratio < least)",),
        why="With an advantage of 0 the push is 0 in both cases.",
    ),
    Equivalent(
        function="data.stackoverflow:regression_scores",
        changes=("return 1.0 if share >= bounds.high else -1.0",),
        why="A share outside the fences is never equal to one.",
    ),
    Equivalent(
        function="data.stackoverflow:contrastive_scores",
        changes=("scores.append(-1 if vote < 0 else math.ceil(math.log2(1 + vote)) + is_accepted)",),
        why="Python adds True as 1.",
    ),
    Equivalent(
        function="nanorlhf.metrics.at_k:metric_at_k",
        changes=("ascending = np.sort(score_table(scores))",),
        why="NumPy sorts the last axis by default, and there are two axes.",
    ),
    Equivalent(
        function="nanorlhf.metrics.at_k:metric_at_k",
        changes=("return (ascending @ np.array(weights)).mean()",),
        why="NumPy's float64 is a float.",
    ),
    Equivalent(
        function="nanorlhf.metrics.at_k:mrr_at_k",
        changes=("order = np.argsort(-values, kind='stable')", "order = np.argsort(-values, axis=1, kind='stable!')"),
        why="NumPy sorts the last axis by default, and reads only the first letter of the kind.",
    ),
    Equivalent(
        function="nanorlhf.metrics.at_k:mrr_at_k",
        changes=("return np.where(ranked.any(axis=1), 1 / (first + 1), 0.0).mean()",),
        why="NumPy's float64 is a float.",
    ),
    Equivalent(
        function="kernels.gae:gae_kernel",
        changes=("row = tl.program_id(0) * T",),
        why="Only above 2^31 numbers does int32 overflow, on a GPU; no test here is that large.",
    ),
    Equivalent(
        function="kernels.gae:gae_kernel",
        changes=(
            "reward = tl.load(rewards + row + t, mask=t < T)",
            "reward = tl.load(rewards + row + t, mask=t <= T, other=0.0)",
            "reward = tl.load(rewards + row + t, mask=t < T, other=1.0)",
            "value = tl.load(values + row + t, mask=t < T)",
            "value = tl.load(values + row + t, mask=t <= T, other=0.0)",
            "value = tl.load(values + row + t, mask=t < T, other=1.0)",
        ),
        why="Numbers loaded from T on aren't used. The one after the last row is out of bounds, but the interpreter "
        "doesn't check.",
    ),
    Equivalent(
        function="kernels.gae:gae_kernel",
        changes=("next_value = tl.load(values + row + t + 1, mask=t + 1 < T)",),
        why="Triton's interpreter loads 0 if the mask is false; on a GPU the value is undefined.",
    ),
    Equivalent(
        function="kernels.gae:gae_kernel",
        changes=(
            "x = tl.where(t <= T, reward + gamma * next_value - value, 0.0)",
            "c = tl.where(t <= T, decay, 1.0)",
            "c = tl.where(t < T, decay, 0.0)",
        ),
        why="Positions from T on are in the first block to be scanned: their x is 0, and so is the carry.",
    ),
)

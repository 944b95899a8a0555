"""Mutants that no test can kill, as they do what the function does. `python -m course mutants` leaves them out."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Equivalent:
    function: str
    """module:name"""
    changes: tuple[str, ...]
    """the mutated statements, as `operators.Mutant.change` has them"""
    why: str


TWO_DIMENSIONS = "The tensor has two dimensions: 1 and -1 are the same."

EQUIVALENT: tuple[Equivalent, ...] = (
    Equivalent(
        function="nanorlhf.model:position_ids",
        changes=("return (mask.cumsum(1) - 1).masked_fill(~mask, 0)",),
        why="PyTorch adds up bools in int64 anyway.",
    ),
    Equivalent(
        function="nanorlhf.model:attention_mask",
        changes=(
            "visible = key < query if causal else torch.ones_like(key == query)",
            "visible = key <= query if causal else torch.ones_like(key != query)",
        ),
        why="The last line lets every token attend to itself; of the argument of ones_like only the shape counts.",
    ),
    Equivalent(
        function="nanorlhf.model:turn_",
        changes=("qk = qkv[:, :, :(n_head - qkv.size(2)) // 2, :2 * cos.size(-1)]",),
        why="(H - (H + 2K)) / 2 is -K: all but the last K heads are the first H + K.",
    ),
    Equivalent(
        function="nanorlhf.model:turn_",
        changes=(
            "a, b = (qk[..., ::2], qk[..., 1::2]) if interleaved else qk.chunk(2, dim=-1)",
            "a, b = (qk[..., 0:-1:2], qk[..., 1::2]) if interleaved else qk.chunk(2, dim=-1)",
        ),
        why="The number of channels is even, so the last one is odd.",
    ),
    Equivalent(
        function="nanorlhf.generate:draw",
        changes=(
            "cumulative = probabilities.cumsum(1, dtype=torch.float64)",
            "return token.clamp(max=probabilities.size(1) - 1)",
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
        why="With k = V the least logit is the threshold, and none is below it.",
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
        function="nanorlhf.generate:keep_top_p",
        changes=(
            "dropped = (before > p).scatter(1, order, before >= p)",
            "dropped = (before < p).scatter(1, order, before >= p)",
        ),
        why="scatter writes every place: of what it writes into only shape and dtype count.",
    ),
    Equivalent(
        function="nanorlhf.model:KVCache.append",
        changes=(
            "keys, values = (self.keys[layer - 1], self.values[layer])",
            "keys, values = (self.keys[layer], self.values[layer - 1])",
        ),
        why="Each layer still has a place of its own: layer 0 gets the last one.",
    ),
    Equivalent(
        function="nanorlhf.model:KVCache.append",
        changes=("if self.length:",),
        why="Both ways write the same columns; a slice in half the time.",
    ),
    Equivalent(
        function="nanorlhf.metrics.at_k:pass_at_k",
        changes=("if n < k:", "pass  # return 1.0"),
        why="With fewer failures than draws one factor of the product is 1 - k / k: it is 0, and the result 1.",
    ),
)

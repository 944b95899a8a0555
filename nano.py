"""RLHF on one page: a language model learns from examples, then from human preferences with PPO.

    python nano.py                  # under a minute on two idle cores
    python nano.py --kl-coef 0      # without the KL penalty: over-optimisation

Read from top to bottom: a small world with known preferences, a GPT, the three stages of RLHF, and
an evaluation with gold scores that training never sees. Tags such as [N+ 23] number the details of
"The N+ Implementation Details of RLHF with PPO" (Huang et al. 2024). train_sft.py, train_rm.py and
train_ppo.py do the same at full size, and tests compare the numbers.

Left out: a KV cache (each sampling step reads the whole text again), micro-batches, multiple
processes, checkpoints. Shapes: B texts, Q query tokens, T response tokens, L = Q + T, C channels.
"""

import argparse
import copy
import math
import random
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ------------------------------------------------------------------------------------- 1. The world
# A customer writes a note: three goods among filler words. We answer with a list of the goods:
#
#     um kale then so eggs please figs :   ->   kale eggs figs
#
# A token is a word. [PAD] fills up short rows, [EOS] ends a response. They must be two tokens: a
# model trained with one token for both would never learn to stop. [N+ 3]
GOODS = "apples bread cheese dates eggs figs grapes honey jam kale leeks milk".split()
FILLERS = "um well so then please maybe".split()
WORDS = ["[PAD]", "[EOS]", ":", *FILLERS, *GOODS]
PAD, EOS, V = 0, 1, len(WORDS)
Q, T = 8, 8  # the longest query; the longest response, [EOS] included


def make_note(rng: random.Random) -> list[str]:
    words = rng.sample(GOODS, 3) + rng.choices(FILLERS, k=rng.randint(2, 4))
    rng.shuffle(words)
    return [*words, ":"]


# The gold score is what the customer wants, and training never sees it: 1 for each good in the
# note, -1 for each word that is wrong or repeated. The best score is 3.
def gold_score(note: list[str], response: list[str]) -> float:
    right = set(note) & set(GOODS) & set(response)
    return len(right) - (len(response) - len(right))


# People write the examples, and the pairs of responses to compare. A careful writer lists nearly
# every good in the note and rarely adds a wrong one.
def write(note: list[str], care: float, rng: random.Random) -> list[str]:
    response = [word for word in note if word in GOODS and rng.random() < care]
    while rng.random() > care and len(response) < T - 1:
        response.insert(rng.randint(0, len(response)), rng.choice(GOODS))
    return response


# A labeller chooses one of two responses and rejects the other. The better one is usually chosen:
# with probability sigmoid(difference of gold scores), as in Bradley and Terry (1952).
def compare(note: list[str], rng: random.Random) -> tuple[list[str], list[str]]:
    first = second = write(note, rng.uniform(0.3, 1.0), rng)
    while gold_score(note, first) == gold_score(note, second):
        second = write(note, rng.uniform(0.3, 1.0), rng)
    margin = gold_score(note, first) - gold_score(note, second)
    return (first, second) if rng.random() < 1 / (1 + math.exp(-margin)) else (second, first)


# Queries are padded on the left, so that all responses begin in the same column. Responses are
# padded on the right, after [EOS]: token ids (B, Q) and (B, T). [N+ 5]
#
#     [PAD] um kale so eggs figs :  |  kale eggs figs [EOS] [PAD] [PAD] [PAD] [PAD]
def encode_queries(notes: list[list[str]]) -> Tensor:
    rows = [["[PAD]"] * (Q - len(note)) + note for note in notes]
    return torch.tensor([[WORDS.index(word) for word in row] for row in rows])


def encode_responses(responses: list[list[str]]) -> Tensor:
    rows = [[*response, "[EOS]"] + ["[PAD]"] * (T - 1 - len(response)) for response in responses]
    return torch.tensor([[WORDS.index(word) for word in row] for row in rows])


def decode(ids: Tensor) -> list[str]:
    """The words of one text (L,), without [PAD] and [EOS]."""
    return [WORDS[number] for number in ids.tolist() if number not in (PAD, EOS)]


# ------------------------------------------------------------------------------------- 2. The model
# A GPT-2: each token attends to itself and earlier tokens, then an MLP processes it.
C, HEADS, LAYERS = 64, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """x (B, L, C), visible (B, 1, L, L): whether token i may attend to token j -> (B, L, C)."""
        B, L, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, L, 3, HEADS, C // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, HEADS, L, C / HEADS) each
        logits = q @ k.transpose(2, 3) / math.sqrt(C // HEADS)  # (B, HEADS, L, L)
        weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(B, L, C))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


# One class serves all four models. The policy and the reference have V outputs per token (logits of
# the next token), the reward model and the value model have one (a score). No dropout: sampling
# and updates must use the same function. [N+ 7]
class GPT(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(V, C), nn.Embedding(Q + T, C)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, outputs, bias=outputs == 1)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.5 / math.sqrt(C))

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, L) -> (B, L, outputs). No token sees a [PAD], and a [PAD] takes no position."""
        real = ids != PAD  # (B, L)
        positions = (real.long().cumsum(1) - 1).clamp(min=0)  # real tokens before each one [N+ 5]
        itself = torch.eye(ids.size(1), dtype=torch.bool)  # a [PAD] must see something: itself
        visible = torch.ones_like(itself).tril() & real[:, None] | itself  # (B, L, L)
        x = self.embedding(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x, visible[:, None])
        return self.head(self.norm(x))


# The output at a token predicts the next one, so the outputs for the T response tokens start at the
# last token of the query.
def response_logits(policy: GPT, query: Tensor, response: Tensor, temperature: float) -> Tensor:
    """Logits (B, T, V) over temperature, the same in the rollout, the reference and the update."""
    logits = policy(torch.cat((query, response), dim=1))[:, query.size(1) - 1 : -1]
    return logits.index_fill(2, torch.tensor(PAD), -torch.inf) / temperature  # never sample [PAD]


def response_logprobs(policy: GPT, query: Tensor, response: Tensor, temperature: float) -> Tensor:
    """Log-probability of each token in nats, (B, T); finite, but meaningless after [EOS]."""
    logprobs = response_logits(policy, query, response, temperature).log_softmax(2)
    return logprobs.gather(2, response.clamp(min=EOS)[:, :, None])[:, :, 0]


def response_values(value_model: GPT, query: Tensor, response: Tensor) -> Tensor:
    """Expected return before each response token, (B, T)."""
    return value_model(torch.cat((query, response), dim=1))[:, query.size(1) - 1 : -1, 0]


# Sample with temperature only, no top-k or top-p: PPO's ratio is relative to this distribution.
@torch.no_grad()
def sample(policy: GPT, query: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    """Sample a response to each query, (B, T). uniforms (B, T) in [0, 1) decide the tokens."""
    response = torch.full(uniforms.shape, PAD)
    ended = torch.zeros(len(query), dtype=torch.bool)
    for t in range(T):
        logits = response_logits(policy, query, response[:, : t + 1], temperature)[:, t]  # (B, V)
        cumulative = logits.softmax(1).cumsum(1, dtype=torch.float64)
        number = uniforms[:, t : t + 1] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, number, right=True)[:, 0]
        response[:, t] = torch.where(ended, PAD, token)
        ended |= token == EOS
    return response


# Two masks follow from where a response ends; True = counts. They differ by one position: the
# finished response is a state, with a value to learn, but no token is chosen there.
def find_end(response: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """response (B, T) -> has_eos (B,), end (B,), actions (B, T), states (B, T).

    response   a  b  E  .  .      E = [EOS], end = 2; without [EOS], end = T - 1
    actions    #  #  #  .  .      t <= end        KL, policy loss
    states     #  #  #  #  .      t <= end + 1    value loss
    """
    has_eos, t = (response == EOS).any(1), torch.arange(T)
    end = torch.where(has_eos, (response == EOS).long().argmax(1), T - 1)
    return has_eos, end, t <= end[:, None], t <= end[:, None] + 1


# ------------------------------------------------------------------------- 3. SFT: imitate examples
# Supervised fine-tuning minimises the negative log-likelihood of the examples, in nats per token.
def sft_loss(policy: GPT, query: Tensor, response: Tensor) -> Tensor:
    _, _, actions, _ = find_end(response)
    return -response_logprobs(policy, query, response, temperature=1.0)[actions].mean()


def train(model: GPT, loss, data: tuple[Tensor, ...], lr: float, generator) -> None:
    """Minimise loss(model, *batch) for two epochs of shuffled batches of 64."""
    order = [torch.randperm(len(data[0]), generator=generator) for _ in range(2)]
    batches = torch.cat(order).split(64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-5)  # [N+ 9, 10]
    for step, rows in enumerate(batches):
        optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * step / len(batches))) / 2
        optimizer.zero_grad()
        batch_loss = loss(model, *(tensor[rows] for tensor in data))
        batch_loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"    step {step:3}: loss {batch_loss:.3f}")


# ---------------------------------------------------------- 4. The reward model: what people prefer
def scalar_model(policy: GPT) -> GPT:
    """Copy the policy, with a new head that outputs one number per token. [N+ 11]"""
    model = GPT(1)
    trunk = {key: w for key, w in policy.state_dict().items() if not key.startswith("head")}
    model.load_state_dict(trunk, strict=False)
    nn.init.normal_(model.head.weight, std=1 / math.sqrt(C + 1))
    return model


def score(reward_model: GPT, query: Tensor, response: Tensor) -> Tensor:
    """Return the output at the last token of each response, (B,). [N+ 12]"""
    _, end, _, _ = find_end(response)
    outputs = reward_model(torch.cat((query, response), dim=1))[:, :, 0]  # (B, L)
    return outputs[torch.arange(len(query)), query.size(1) + end]


# If the scores were the gold scores, sigmoid(margin) would be the probability of the label. A
# constant added to all scores doesn't change the loss: normalise makes the examples' mean 0.
def rm_loss(reward_model: GPT, query: Tensor, chosen: Tensor, rejected: Tensor) -> Tensor:
    margin = score(reward_model, query, chosen) - score(reward_model, query, rejected)
    return -F.logsigmoid(margin).mean()


@torch.no_grad()
def normalise(reward_model: GPT, query: Tensor, response: Tensor) -> None:  # [N+ 15]
    reward_model.head.bias -= score(reward_model, query, response).mean()


# ------------------------------------------------------------------ 5. PPO: do more of what is good
@dataclass
class Settings:
    kl_coef: float = 0.1  # beta: penalty per nat of KL to the reference
    temperature: float = 0.7
    missing_eos_score: float = -1.0
    gamma: float = 1.0  # discount per token
    lam: float = 0.95  # lambda of GAE
    clip_range: float = 0.2
    value_coef: float = 0.1
    num_epochs: int = 4  # passes over each rollout
    num_minibatches: int = 1  # optimizer steps per pass
    lr: float = 1e-3


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Normalise to mean 0 and standard deviation 1 over the mask; 0 elsewhere. [N+ 25]"""
    mean, variance = x[mask].mean(), x[mask].var(correction=0)
    return torch.where(mask, (x - mean) * torch.rsqrt(variance + 1e-8), 0.0)


# Generalised advantage estimation: how much better than expected each token was.
def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """rewards r, values V -> advantages A, returns R, (B, T) each.

    delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        R = A + V
    """
    advantages = torch.zeros_like(rewards)
    next_advantage = next_value = torch.zeros(len(rewards))
    for t in reversed(range(T)):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = next_advantage = delta + gamma * lam * next_advantage
        next_value = values[:, t]
    return advantages, advantages + values


@torch.no_grad()
def rollout(policy, ref_policy, reward_model, value_model, query, uniforms, s) -> dict[str, Tensor]:
    """Sample responses to query (B, Q) and evaluate every token: (B, T) each, but scores (B,)."""
    response = sample(policy, query, uniforms, s.temperature)
    has_eos, end, actions, states = find_end(response)
    logprobs = response_logprobs(policy, query, response, s.temperature)
    ref_logprobs = response_logprobs(ref_policy, query, response, s.temperature)
    values = torch.where(states, response_values(value_model, query, response), 0.0)

    # [N+ 23] EOS trick: no labeller saw an unfinished response, so its score is meaningless.
    scores = score(reward_model, query, response)
    scores = torch.where(has_eos, scores, s.missing_eos_score)

    # Each token pays a KL penalty. The score is added once: in the state after [EOS].
    kl = torch.where(actions, logprobs - ref_logprobs, 0.0)
    rewards = -s.kl_coef * kl
    rewards[torch.arange(len(query)), (end + 1).clamp(max=T - 1)] += scores

    advantages, returns = gae(rewards, values, s.gamma, s.lam)
    return dict(query=query, response=response, actions=actions, states=states, scores=scores,
                logprobs=logprobs, ref_logprobs=ref_logprobs, kl=kl, rewards=rewards,
                values=values, returns=returns, advantages=advantages,
                whitened=whiten(advantages, actions))  # fmt: skip


# E[r], the expected reward of the policy pi, has the gradient E[r grad log pi], because grad pi =
# pi grad log pi. So samples estimate it (REINFORCE). Subtracting a baseline b that doesn't depend
# on the token leaves it unbiased: E[b grad log pi] = b grad(sum of pi) = b grad 1 = 0
# (docs/lecture.md#34-the-policy-gradient).
#
# The ratio is how much more probable a token is than in the rollout: 1 in the first step, where the
# gradient of -A ratio is -A grad log pi, REINFORCE with the value as baseline (exactly so for
# lam = 1, before whitening). Both losses take the worse of two terms, so that moving past the clip
# range gains nothing.
def ppo_loss(policy: GPT, value_model: GPT, batch: dict[str, Tensor], s: Settings) -> Tensor:
    """Return policy loss + value_coef * value loss, each a mean over its mask in the minibatch."""
    ids = batch["query"], batch["response"]
    advantages, values, returns = (batch[key] for key in ("whitened", "values", "returns"))
    ratio = (response_logprobs(policy, *ids, s.temperature) - batch["logprobs"]).exp()
    clipped_ratio = ratio.clamp(1 - s.clip_range, 1 + s.clip_range)
    pg_losses = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    pg_loss = pg_losses[batch["actions"]].sum() / batch["actions"].sum()

    new_values = response_values(value_model, *ids)
    clipped_values = new_values.clamp(values - s.clip_range, values + s.clip_range)
    vf_losses = 0.5 * torch.maximum((new_values - returns) ** 2, (clipped_values - returns) ** 2)
    vf_loss = vf_losses[batch["states"]].sum() / batch["states"].sum()
    return pg_loss + s.value_coef * vf_loss


def train_ppo(policy, ref_policy, reward_model, value_model, queries, s, generator) -> None:
    """Run one update per batch of queries, (num_updates, B, Q)."""
    parameters = [*policy.parameters(), *value_model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=s.lr, eps=1e-5)  # [N+ 20] not 1e-8
    for update, query in enumerate(queries):
        optimizer.param_groups[0]["lr"] = s.lr * (1 - update / len(queries))  # [N+ 20] linear
        uniforms = torch.rand((len(query), T), generator=generator, dtype=torch.float64)
        batch = rollout(policy, ref_policy, reward_model, value_model, query, uniforms, s)
        for _ in range(s.num_epochs):
            for rows in torch.randperm(len(query), generator=generator).chunk(s.num_minibatches):
                minibatch = {key: tensor[rows] for key, tensor in batch.items()}
                optimizer.zero_grad()
                ppo_loss(policy, value_model, minibatch, s).backward()
                optimizer.step()
        if update % 10 == 0:
            kl, mean = batch["kl"].sum(1).mean(), batch["scores"].mean()
            print(f"    update {update:2}: score {mean:5.2f}, KL {kl:5.2f} nats per response")


# ------------------------------------------------------------------ 6. Evaluation with gold scores
def evaluate(name: str, policy: GPT, frozen: tuple, notes: list, s: Settings) -> dict[str, Tensor]:
    """Print a row of the table, averaged over one response per note, and return the rollout."""
    uniforms = torch.rand((len(notes), T), dtype=torch.float64)
    batch = rollout(policy, *frozen, encode_queries(notes), uniforms, s)
    texts = [decode(ids) for ids in batch["response"]]
    gold = sum(map(gold_score, notes, texts)) / len(notes)
    kl, words = batch["kl"].sum(1).mean(), sum(map(len, texts)) / len(notes)
    eos = (batch["response"] == EOS).any(1).float().mean()
    numbers = f"{gold:6.2f} {batch['scores'].mean():9.2f} {kl:9.2f} {words:6.2f} {eos:5.2f}"
    print(f"    {name:8} {numbers}   {' '.join(texts[0])}")
    return batch


def take_apart(batch: dict[str, Tensor], row: int) -> None:
    """Print the numbers of each token. The finished response is a state, but no token follows."""
    of_tokens, of_states = ("logprobs", "ref_logprobs", "kl"), ("rewards", "values", "returns")
    columns = *of_tokens, "whitened", *of_states, "advantages"
    print(f"    {'':10}" + "".join(f"{column:>13}" for column in columns))
    for t, token in enumerate(batch["response"][row].tolist()):
        if batch["actions"][row, t]:
            numbers = "".join(f"{batch[column][row, t]:13.3f}" for column in columns)
            print(f"    {WORDS[token]:10}{numbers}")
        elif batch["states"][row, t]:
            numbers = "".join(f"{batch[column][row, t]:13.3f}" for column in columns[4:])
            print(f"    {'(finished)':10}{'':52}{numbers}")


def main(num_examples: int = 16_000, num_pairs: int = 10_000, num_updates: int = 50) -> None:
    parser = argparse.ArgumentParser(description="RLHF on one page")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kl-coef", type=float, default=Settings.kl_coef, help="0: no KL penalty")
    args = parser.parse_args()
    start, s = time.time(), Settings(kl_coef=args.kl_coef)
    torch.set_num_threads(2)  # more threads don't help a model this small
    torch.manual_seed(args.seed)
    rng, generator = random.Random(args.seed), torch.Generator().manual_seed(args.seed)

    notes = [make_note(rng) for _ in range(num_examples)]
    examples = encode_queries(notes), encode_responses([write(note, 0.6, rng) for note in notes])
    print(f"SFT: imitate {num_examples:,} examples by careless writers")
    untrained = GPT(V)
    ref_policy = copy.deepcopy(untrained)
    train(ref_policy, sft_loss, examples, 3e-3, generator)

    notes = [make_note(rng) for _ in range(num_pairs)]
    chosen, rejected = zip(*(compare(note, rng) for note in notes), strict=True)
    pairs = encode_queries(notes), encode_responses(chosen), encode_responses(rejected)
    print(f"{time.time() - start:3.0f} s  Reward model: learn from {num_pairs:,} labels")
    reward_model = scalar_model(ref_policy)
    train(reward_model, rm_loss, pairs, 1e-3, generator)
    normalise(reward_model, *examples)

    print(f"{time.time() - start:3.0f} s  PPO: {num_updates} updates, KL coefficient {s.kl_coef}")
    policy, value_model = copy.deepcopy(ref_policy), copy.deepcopy(reward_model)  # [N+ 22]
    queries = encode_queries([make_note(rng) for _ in range(num_updates * 128)]).view(-1, 128, Q)
    train_ppo(policy, ref_policy, reward_model, value_model, queries, s, generator)

    notes = [make_note(rng) for _ in range(512)]
    print(f"{time.time() - start:3.0f} s  Gold scores (at most 3) and scores on 512 new notes")
    print(f"    policy     gold     score  KL, nats  words   EOS   {' '.join(notes[0])}")
    frozen = ref_policy, reward_model, value_model
    for name, model in (("start", untrained), ("SFT", ref_policy), ("PPO", policy)):
        batch = evaluate(name, model, frozen, notes, s)
    print(f"{time.time() - start:3.0f} s  PPO's response to that note, token by token:")
    take_apart(batch, 0)


if __name__ == "__main__":
    main()

"""The microscope page: its numbers match the trace, its formulas match its cells, its lines of code exist."""

import json
import math
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

import train_grpo
import train_ppo
from kernels import k3
from nanorlhf.errors import InputError
from nanorlhf.grpo import ALGORITHMS, find_policy_loss
from nanorlhf.ppo import policy_loss, value_loss
from nanorlhf.report import microscope
from nanorlhf.report.microscope import (
    Args,
    gae_terms,
    lines_of,
    main,
    page_data,
    page_of,
    policy_push,
    source_line,
)
from nanorlhf.rules.formulas import evaluate
from nanorlhf.training.run_directory import flat_settings
from nanorlhf.training.settings import SamplerSettings
from nanorlhf.training.trace import PER_ROW, ratio_to, read_trace, read_traces, save_trace, trace_path
from tests.test_train_ppo import policy_that_stops

DEMO = microscope.ROOT / "docs" / "microscope" / "demo.html"
TIS = SamplerSettings(correction="tis", dtype="bfloat16")
TO_SAMPLER = SamplerSettings(correction="sampler_logprobs", dtype="bfloat16")
VARIANTS = {
    "ppo": {},
    "ppo last token": {
        "score_at": "last_token", "whiten_rewards": True, "value_clip_range": None,
        "sampler": replace(TO_SAMPLER, top_p=0.7),
    },
    "ppo per token": {"reward": "per_token", "whiten_rewards": True},
    "ppo tis": {"whiten_advantages": False, "sampler": TIS, "clip_range": 0.01},
    "grpo": {},
    "grpo tis": {"sampler": TIS},
    "ppo icepop": {"sampler": replace(TIS, correction="icepop", top_p=0.7)},
    "ppo sequence mis": {"sampler": replace(TIS, correction="sequence_mis", top_p=0.7)},
    "grpo sequence tis": {"sampler": replace(TIS, correction="sequence_tis", top_p=0.7)},
    "dr_grpo": {},
    "rloo": {},
    "maxrl": {"kl_coef": 0.0, "missing_eos_score": None, "reward": "long"},
    "gspo": {"clip_range": (0.003, 0.004), "sampler": TO_SAMPLER},
    "dapo": {"kl_coef": 0.0, "missing_eos_score": None},
    "cispo": {"kl_coef": 0.0, "clip_range": (0.05, 0.1)},
    "online_dpo": {"num_epochs": 1},
    "reinforce++": {},
    "reinforce++ per token": {"reward": "per_token"},
    "reinforce++ discounted": {"gamma": 0.9, "sampler": TIS},
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(miniature, tmp_path_factory):
    """Train each variant for three traced updates of 8 or 12 responses, with a large lr so that ratios are clipped."""
    root = tmp_path_factory.mktemp("microscope")
    sft = str(policy_that_stops(miniature.root))
    ppo = replace(miniature.ppo, sft=sft, lr=3e-3, trace=4)
    path = root / "rule.py"
    path.write_text(
        "def per_token(q, r, response_ids): return [[0.1 * (i % 5) for i in ids] for ids in response_ids]\n"
        "def long(q, r): return [float(len(text) > 12) for text in r]\n"
    )
    for name, settings in VARIANTS.items():
        out = root / name.replace(" ", "_")
        settings = settings | ({"reward": f"{path}:{settings['reward']}"} if "reward" in settings else {})
        if name.startswith("ppo"):
            train_ppo.main(replace(ppo, out=out, **settings))
            continue
        grpo = replace(
            train_grpo.RECIPES["tiny"][1],
            data=ppo.data, device="cpu", out=out, sft=sft, reward_model=ppo.reward_model, max_query_length=160,
            response_length=12, total_episodes=24, batch_size=12, micro_batch_size=4, num_epochs=2,
            samples_per_query=3, lr=3e-3, trace=4, algorithm=name.split()[0],
        )  # fmt: skip
        train_grpo.main(replace(grpo, **settings))
    return root


class Page(HTMLParser):
    """Return a page's external resources and its embedded data."""

    def __init__(self, text):
        super().__init__()
        self.loaded, self.data, self.inside = [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.loaded += [values[name] for name in ("src", "href", "srcset", "action") if values.get(name)]
        self.inside = values.get("id") == "data"

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        self.data += data * self.inside


def numbers_on_the_page(response, update):
    """Return the values that the page's script inserts into formulas: cells (1, T), 0 if empty, and constants."""
    cells = {key: column for key, column in response["cells"].items() if not any(isinstance(x, str) for x in column)}
    T = len(cells["states"])
    return {
        **{name: x for name, x in (update["constants"] | response["constants"]).items() if x is not None},
        **{key: torch.tensor([[x or 0.0 for x in column]], dtype=torch.float64) for key, column in cells.items()},
        "t": torch.arange(T),
    }


@pytest.mark.parametrize("name", [*VARIANTS, "the demo"])
def test_the_formulas_come_to_the_cells(runs, name):
    data = page_data(DEMO if name == "the demo" else runs / name.replace(" ", "_"))
    checked, words = set(), set()
    for update in data["updates"]:
        for response in update["responses"]:
            numbers = numbers_on_the_page(response, update)
            for line in data["lines"]:
                key = line["key"]
                cells, which = response["cells"][key], response["which"].get(key)
                values = [evaluate(formula, numbers).expand(1, len(cells))[0].tolist() for formula in line["formulas"]]
                for t, cell in enumerate(cells):
                    if not values or cell in (None, ""):
                        continue
                    case = which[t] if which else 0
                    if line["kind"] == "words":
                        words.add(cell)
                        assert values[case][t] == ("active" in cell), (key, t, line["formulas"][case])
                    else:
                        expected = pytest.approx(cell, abs=2e-5, rel=2e-5)
                        assert values[case][t] == expected, (key, t, line["formulas"][case])
                    checked.add((key, case))
    wanted = {(line["key"], i) for line in data["lines"] for i in range(len(line["formulas"]))}
    rare = {(f"push.{epoch}", 1) for epoch in range(4)}  # a clipped token
    if name == "ppo last token":
        rare.add(("rewards", 2))  # the score at a state without an action
    if name == "the demo":
        rare.add(("rewards", 1))  # the score at a token: all of its responses end with EOS
    assert wanted - rare <= checked and "inside" in words


def test_a_clipped_token_is_seen(runs):
    """With this learning rate some ratios leave the clip range in the second epoch and have a gradient of 0."""
    data = page_data(runs / "ppo_tis")
    cells = [
        (response["cells"]["clip.1"][t], response["cells"]["push.1"][t])
        for update in data["updates"]
        for response in update["responses"]
        for t in range(len(response["cells"]["clip.1"]))
    ]
    active = [push for word, push in cells if "active" in word]
    assert active and set(active) == {0}
    assert any(word in ("above", "below") and push != 0 for word, push in cells)


@pytest.mark.parametrize("name", ["ppo", "ppo_last_token", "grpo"])
def test_the_page_holds_the_runs_own_tensors(runs, name):
    data = page_data(runs / name)
    for update, (tensors, about) in zip(data["updates"], read_traces(runs / name), strict=True):
        assert update["update"] == about["update"]
        for i, response in enumerate(update["responses"]):
            T = int(tensors["states"][i].sum())
            assert response["texts"] == about["texts"][i] and len(response["cells"]["states"]) == T
            for key in (
                "logprobs",
                "ref_logprobs",
                "sampled_logprobs",
                "rewards",
                "values",
                "raw_advantages",
                "returns",
            ):
                if key in tensors:
                    cells = torch.tensor([x or 0.0 for x in response["cells"][key]], dtype=torch.float64).float()
                    assert torch.equal(cells, tensors[key][i, :T])
            for epoch in range(2):
                cells = [x or 0.0 for x in response["cells"][f"new_logprobs.{epoch}"]]
                assert torch.equal(
                    torch.tensor(cells, dtype=torch.float64).float(), tensors["new_logprobs"][epoch, i, :T]
                )


def test_the_fixed_responses_are_those_of_the_trace(runs):
    data, traces = page_data(runs / "ppo"), read_traces(runs / "ppo")
    for i, fixed in enumerate(data["fixed"]):
        assert fixed["texts"] == traces[0][1]["texts"][i]
        assert fixed["answers"] == [about["answers"][i] for _, about in traces]
        for row, (tensors, _) in zip(fixed["logprobs"], traces, strict=True):
            assert row == pytest.approx(tensors["fixed_logprobs"][i, : len(row)].tolist(), rel=1e-8)


@pytest.mark.parametrize("name", VARIANTS)
def test_losses_and_gradients_are_those_of_the_product(runs, name):
    """Compare with each algorithm's policy_loss, value_loss and autograd in float64."""
    data, traces = page_data(runs / name.replace(" ", "_")), read_traces(runs / name.replace(" ", "_"))
    settings, algorithm = flat_settings(traces[0][1]["settings"]), traces[0][1]["algorithm"]
    for update, (tensors, about) in zip(data["updates"], traces, strict=True):
        x = {name: value.double() for name, value in tensors.items() if value.is_floating_point()}
        actions, states = (tensors[name] & tensors["in_loss"] for name in ("actions", "states"))
        old, clip_range = x[ratio_to(settings["sampler.correction"])], settings["clip_range"]
        for epoch, new in enumerate(x["new_logprobs"]):
            new.requires_grad_(True)
            losses, is_clipped = find_policy_loss(algorithm)(new, old, x["advantages"], actions, clip_range)
            total = losses.sum()
            if algorithm in ALGORITHMS and ALGORITHMS[algorithm].has_kl_loss:
                total = total + about["kl_coef"] * k3(new, x["ref_logprobs"])[actions].sum()
            total.backward()
            expected = {"policy_loss": (losses.detach(), actions), "push": (-new.grad, actions)}
            if algorithm == "ppo":
                of_values = (x["new_values"][epoch], x["values"], x["returns"])
                expected["value_loss"] = value_loss(*of_values, states, settings["value_clip_range"])[0], states
            for i, response in enumerate(update["responses"]):
                T = len(response["cells"]["states"])
                for key, (wanted, mask) in expected.items():
                    cells = torch.tensor([math.nan if c is None else c for c in response["cells"][f"{key}.{epoch}"]])
                    wanted = wanted[i, :T].where(mask[i, :T], torch.nan)
                    assert torch.allclose(cells.double(), wanted, atol=1e-6, rtol=1e-6, equal_nan=True), key
                active = ["active" in word for word in response["cells"][f"clip.{epoch}"]]
                assert active == is_clipped[i, :T].tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_line_of_code_exists(runs, name):
    for line in page_data(runs / name.replace(" ", "_"))["lines"]:
        file, _, number = line["source"].partition(":")
        assert number, f"{line['key']}: no line of {file} holds {line['expression']}"
        text = (microscope.ROOT / file).read_text().splitlines()[int(number) - 1]
        assert line["expression"] in text


def test_the_terms_of_gae_add_up_to_the_sum_of_all_later_deltas():
    """Responses have 1 to 5 states; the tensors are NaN after the end."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn((2, 5, 5), generator=generator, dtype=torch.float64)
    states = torch.ones(5, 5).tril().bool()
    for gamma, lam in ((0.9, 0.8), (1.0, 0.5)):
        deltas, advantages = torch.full((2, 5, 5), torch.nan, dtype=torch.float64)
        for i, t in states.nonzero().tolist():  # row i has i + 1 states
            deltas[i, t] = rewards[i, t] + gamma * (values[i, t + 1] if t < i else 0.0) - values[i, t]
        for i, t in states.nonzero().tolist():
            advantages[i, t] = sum((gamma * lam) ** (s - t) * deltas[i, s] for s in range(t, i + 1))
        inputs = (x.where(states, torch.nan) for x in (rewards, values, advantages))
        delta, carried = gae_terms(*inputs, states, gamma, lam)
        assert torch.allclose(delta[states], deltas[states])
        assert torch.allclose((delta + carried)[states], advantages[states])


def test_the_push_is_minus_autograds_slope_of_the_policy_loss():
    """Ratios are inside, at, below and above the clip range, each with good, neutral and bad tokens."""
    ratio = torch.tensor([0.0, 0.3, 0.7, 0.75, 0.8, 1.0, 1.2, 1.25, 1.3, 4.0], dtype=torch.float64).repeat(5, 1)
    advantages = torch.tensor([[2.0], [0.5], [0.0], [-0.5], [-3.0]], dtype=torch.float64).expand(5, 10)
    new_logprobs = ratio.log().clamp(min=-50).requires_grad_(True)
    losses, _ = policy_loss(new_logprobs, torch.zeros_like(ratio), advantages, ratio >= 0, 0.25)
    losses.sum().backward()
    assert torch.allclose(policy_push(advantages, ratio, 0.25), -new_logprobs.grad)


def without_line_numbers(page):
    return re.sub(r'("source":"[^":]+):[0-9]+"', r'\1"', page)


def test_the_demos_page_is_the_one_that_its_data_give_now():
    """If this fails, run: python -m nanorlhf.report.microscope --run docs/microscope/demo.html."""
    text = DEMO.read_text()
    assert without_line_numbers(page_of(page_data(DEMO))) == without_line_numbers(text)
    assert len(text) < 500_000


def test_a_page_regenerated_from_its_data_is_the_same(runs, tmp_path):
    path = main(Args(run=runs / "ppo_tis", out=tmp_path / "page.html"))
    old = path.read_text()
    path.write_text(old.replace("<h1>Microscope</h1>", "<h1>Old</h1>").replace('"label":"ratio"', '"label":"old"'))
    assert path.read_text() != old
    assert main(Args(run=path)) == path and path.read_text() == old


def test_the_example_in_the_docs_has_the_numbers_of_the_demos_page():
    text = (microscope.ROOT / "docs" / "microscope.md").read_text()
    block = re.search(r"The token ` Atlantis`:\n\n(.*?)\n\n", text, re.DOTALL)[1]
    data = page_data(DEMO)
    [update] = [update for update in data["updates"] if update["update"] == 6]
    response = max(update["responses"], key=lambda response: response["clipped"])
    t, cells, checked = response["texts"].index(" Atlantis"), response["cells"], 0
    for line in block.splitlines():
        epoch, label, value = re.match(r" *(?:epoch (\d) )? *(\D+?) +(-?\d+\.\d{3})", line).groups()
        [key] = [
            entry["key"] for entry in data["lines"]
            if entry["label"] == label and (epoch is None or entry["key"].endswith(f".{int(epoch) - 1}"))
        ]  # fmt: skip
        assert value == f"{cells[key][t]:.3f}", line
        checked += 1
    assert checked == 10
    for said in re.findall(r"^    update (\d+) +(.+)$", text, re.M):
        [number] = [i for i, update in enumerate(data["updates"]) if update["update"] == int(said[0])]
        assert data["fixed"][0]["answers"][number].strip() == said[1]


def test_tokens_outside_the_loss_have_empty_cells(runs, tmp_path):
    """A token dropped from the loss has a ratio but no gradient; a response that no step read has neither."""
    shutil.copytree(runs / "ppo", tmp_path / "run")
    path = trace_path(tmp_path / "run", 0)
    tensors, about = read_trace(path)
    tensors["in_loss"][:2] = False
    for name in ("new_logprobs", "new_values"):
        tensors[name][1, 1] = torch.nan
    save_trace(path, tensors, about)
    dropped, unread = page_data(tmp_path / "run")["updates"][0]["responses"][:2]
    of_loss = ("push", "policy_loss", "clip", "value_loss", "value_clip")
    assert all(x in (None, "") for key in of_loss for epoch in "01" for x in dropped["cells"][f"{key}.{epoch}"])
    assert None not in dropped["cells"]["ratio.1"][: len(dropped["texts"])]
    assert all(x in (None, "") for key in of_loss for x in unread["cells"][f"{key}.1"])
    for key in ("ratio", "new_logprobs", "new_values", "clipped_values"):
        assert set(unread["cells"][f"{key}.1"]) == {None}, key
        assert unread["cells"][f"{key}.0"][0] is not None, key


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_page_of_a_run_that_diverged_shows_its_numbers(runs, tmp_path, name, value):
    shutil.copytree(runs / name.replace(" ", "_"), tmp_path / "run")
    path = trace_path(tmp_path / "run", 0)
    tensors, about = read_trace(path)
    spoiled = {key: torch.full_like(x, value) if x.is_floating_point() else x for key, x in tensors.items()}
    statistics = {key: value for key in about if key.endswith(("_mean", "_var", "_coef"))}
    save_trace(path, spoiled, about | statistics)
    page = Page(main(Args(run=tmp_path / "run", out=tmp_path / "page.html")).read_text())
    data = json.loads(page.data, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    update, shown = data["updates"][0], json.dumps(value)
    assert set(update["constants"].values()) >= ({"NaN"} if statistics else set())  # JSON has no infinity
    for response, counts in zip(update["responses"], tensors["actions"].sum(1).tolist(), strict=True):
        for key in ("logprobs", "advantages", "new_logprobs.0"):
            cells = response["cells"][key]
            assert cells[:counts] == [shown] * counts and set(cells[counts:]) <= {None}, key
        assert response["constants"]["score"] == shown and response["kl"] == "NaN"
    assert data["updates"][1] == page_data(runs / name.replace(" ", "_"))["updates"][1]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"clip_range": math.inf}, "the field 'clip_range' must be a number, or two"),
        ({"clip_range": [0.1, 0.2, 0.3]}, "the field 'clip_range' must be a number, or two"),
        ({"value_clip_range": ["x"]}, "the field 'value_clip_range' must be float, not list"),
        ({"temperature": math.nan}, "the field 'temperature' must be float, not NoneType"),
        ({"gamma": "x"}, "the field 'gamma' must be float, not str"),
        ({"lam": None}, "the field 'lam' must be float, not NoneType"),
        ({"whiten_rewards": 0}, "the field 'whiten_rewards' must be bool, not int"),
        ({"sampler": {}}, "the field 'sampler.correction' is missing"),
        ({"gamma": 0, "lam": 0}, None),
        ({"gamma": 0.5}, None),
    ],
)
def test_odd_settings_are_refused_or_shown(runs, tmp_path, changed, sentence):
    shutil.copytree(runs / "ppo", tmp_path / "run")
    for path in (tmp_path / "run" / "trace").iterdir():
        tensors, about = read_trace(path)
        save_trace(path, tensors, about | {"settings": about["settings"] | changed})
    if sentence is None:
        assert page_data(tmp_path / "run")["updates"][0]["constants"]["gamma"] == changed["gamma"]
        return
    with pytest.raises(InputError, match=f"^{tmp_path}/run/trace: {sentence}"):
        page_data(tmp_path / "run")


@pytest.mark.parametrize("shape", [(0, 12), (4, 0)])
def test_a_trace_without_tokens_makes_no_page(runs, tmp_path, shape):
    shutil.copytree(runs / "ppo", tmp_path / "run")
    tensors, about = read_trace(trace_path(tmp_path / "run", 0))
    n, T = shape
    cut = {
        name: x[:, :n, :T] if name.startswith("new_") else x[:n] if name in (*PER_ROW, "query") else x[:n, :T]
        for name, x in tensors.items()
    }
    cut["fixed_logprobs"] = tensors["fixed_logprobs"][:, :T]
    save_trace(trace_path(tmp_path / "run", 0), cut, about | {name: about[name][:n] for name in ("queries", "texts")})
    with pytest.raises(InputError, match="run/trace: update 0 has no tokens"):
        page_data(tmp_path / "run")


@pytest.mark.parametrize("number", [0, -1, "x", None])
def test_a_group_has_at_least_one_response(runs, tmp_path, number):
    shutil.copytree(runs / "grpo", tmp_path / "run")
    for path in (tmp_path / "run" / "trace").iterdir():
        tensors, about = read_trace(path)
        save_trace(path, tensors, about | {"settings": about["settings"] | {"samples_per_query": number}})
    with pytest.raises(InputError, match="the field 'samples_per_query' (must be|is)"):
        page_data(tmp_path / "run")


def test_updates_of_different_runs_make_no_page(runs, tmp_path):
    shutil.copytree(runs / "ppo", tmp_path / "run")
    path = trace_path(tmp_path / "run", 1)
    tensors, about = read_trace(path)
    epochs = {name: x[:1] for name, x in tensors.items() if name.startswith("new_")}
    for changed, said, sentence in (
        ({}, about | {"settings": about["settings"] | {"clip_range": 0.5}}, "1 is from a run with other settings"),
        (epochs, about, "update 1 has another number of epochs"),
        ({"fixed_logprobs": tensors["fixed_logprobs"][:1]}, about | {"answers": ["a"]}, "has other fixed responses"),
    ):
        save_trace(path, tensors | changed, said)
        with pytest.raises(InputError, match=f"{sentence}; delete its file"):
            page_data(tmp_path / "run")


def test_the_data_of_a_page_may_be_damaged(runs, tmp_path):
    data = page_data(runs / "ppo")
    for spoiled in ({"updates": []}, {"updates": [{}]}, {"algorithm": "x"}, {"settings": {}}, {"settings": []}):
        (tmp_path / "page.html").write_text(page_of(data | spoiled))
        with pytest.raises(InputError, match="page.html: damaged data"):
            main(Args(run=tmp_path / "page.html"))


def test_an_expression_that_is_gone_shows_the_file_alone():
    assert source_line("train_ppo.py", "no such expression") == "train_ppo.py"
    assert source_line("no_such_file.py", "x") == "no_such_file.py"


def test_a_grpo_page_has_whole_groups(runs):
    data = page_data(runs / "grpo")
    for update in data["updates"]:
        groups = {}
        for response in update["responses"]:
            groups.setdefault(response["group"], []).append(response["constants"])
        for members in groups.values():
            assert len(members) == 3
            scores = [member["score"] for member in members]
            assert members[0]["group_mean"] == pytest.approx(sum(scores) / 3, abs=1e-6)


def test_the_page_is_one_file_that_needs_no_network(runs, tmp_path):
    out = main(Args(run=runs / "ppo", out=tmp_path / "page.html"))
    text = out.read_text()
    page = Page(text)
    assert page.loaded == ["data:,"] and "http://" not in text and "https://" not in text
    assert "import(" not in text and "fetch(" not in text and "{{" not in text
    assert json.loads(page.data) == json.loads(json.dumps(page_data(runs / "ppo")))
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_response_text_can_not_end_the_data(runs, tmp_path, monkeypatch):
    evil = page_data(runs / "ppo")
    evil["updates"][0]["responses"][0]["query"] = "</script><script>alert(1)</script><!--"
    monkeypatch.setattr(microscope, "page_data", lambda run: evil)
    page = Page(main(Args(run=runs / "ppo", out=tmp_path / "page.html")).read_text())
    assert json.loads(page.data) == json.loads(json.dumps(evil))


def test_bad_input_raises_input_error(runs, tmp_path):
    with pytest.raises(InputError, match="has no trace: train with --trace 4"):
        main(Args(run=tmp_path))
    with pytest.raises(InputError, match="--out must be a file"):
        main(Args(run=runs / "ppo", out=tmp_path))
    (tmp_path / "other.html").write_text("<p>other</p>")
    with pytest.raises(InputError, match="other.html isn't a microscope page; pass one, or a run directory"):
        main(Args(run=tmp_path / "other.html"))


def test_each_line_has_a_label_and_an_own_name():
    settings = flat_settings({"score_at": "after_eos", "whiten_rewards": False, "whiten_advantages": True,
                              "value_clip_range": 0.2, "sampler": {"correction": "none"}})  # fmt: skip
    lines = lines_of("ppo", settings, 4)
    assert len({line.key for line in lines}) == len(lines) == 13 + 4 * 9
    assert all(line.label and line.about and not line.about.endswith(".") for line in lines)


DRIVER = """(() => {
  const press = {bubbles: true};
  const key = k => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {...press, key: k}));
  document.querySelector('#tokens td[data-key="kl"][data-t="0"]').click();
  const formula = $("formula").textContent;
  key("ArrowRight"); key("ArrowDown");
  const place = document.activeElement.dataset.key + " " + document.activeElement.dataset.t;
  $("update").value = 2;
  $("update").dispatchEvent(new Event("input"));
  return [formula, place, $("update-name").textContent, $("moves").querySelector("tr.now th").textContent,
          document.querySelectorAll("#tokens tbody tr:not(.section)").length];
})()"""


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_a_browser_shows_a_cell_and_moves_with_the_keys(runs, tmp_path, browser, name):
    browser.errors.clear()
    browser.open(main(Args(run=runs / name, out=tmp_path / "page.html")).as_uri())
    formula, cell, update, framed, rows = browser.ask(DRIVER)
    assert not browser.errors
    assert "logprobs - ref_logprobs" in formula and re.search(r"train_\w+\.py:\d+", formula)
    number = 2 if name == "ppo" else 1
    assert (
        cell == "actions 1" and update == f"{number}  ({number + 1} of {number + 1} traced)" and framed == str(number)
    )
    assert rows == len(page_data(runs / name)["lines"])


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_all_can_read_the_page(runs, tmp_path, unreadable, name):
    assert not unreadable(main(Args(run=runs / name, out=tmp_path / "page.html")))

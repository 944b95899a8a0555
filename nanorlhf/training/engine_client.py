"""Rollouts from an inference engine: a vLLM or SGLang server samples, and gets the policy's weights after updates.

The HTTP endpoints and fields that we use, checked against the sources of vLLM 0.33.0 and SGLang 0.5.23:

    GET  /v1/models                 data[0]: id; owned_by, vllm or sglang
    POST /v1/completions            prompt as ids, return_token_ids, logprobs -> choices[0]: token_ids,
                                    prompt_token_ids, logprobs.token_logprobs, finish_reason
    POST /collective_rpc            vLLM, with VLLM_SERVER_DEV_MODE=1: its workers' reload_weights(weights_path), then
    POST /reset_prefix_cache        drops keys and values of the old weights
    POST /update_weights_from_disk  SGLang: model_path; drops them too

The weights go through a directory that the server can read. Each row is a request with its own seed, so that equal
queries get different responses. A response that the policy can't have written raises an error; we never repair it.
"""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import torch
from torch import Tensor

from nanorlhf.cli import check_url
from nanorlhf.errors import InputError
from nanorlhf.rewards.limits import limits

TIMEOUT = 600.0  # seconds per request
WAITS = (1.0, 4.0, 16.0)  # seconds before each retry when the server is down or busy
ROUNDING = 1e-3  # tolerance for a log-probability above 0
MAX_ANSWER = 2**24  # bytes: 16 MiB. A completion of 100,000 tokens with log-probabilities takes 3 MiB
AT_ONCE = 64  # requests per rank


class Engine:
    """A client of the server at `url`, http://HOST:PORT. Every failure raises InputError with the URL and advice."""

    def __init__(self, url: str):
        self.url = url.rstrip("/").removesuffix("/v1")
        check_url("--sampler.url", url, "write http://HOST:PORT of a vLLM or SGLang server")
        self.client = httpx2.Client(
            headers={"Connection": "close", "Accept-Encoding": "identity"},
            timeout=TIMEOUT,
            limits=httpx2.Limits(max_connections=None),
            trust_env=False,  # no proxies: the server is in the same network
            event_hooks=limits(TIMEOUT, MAX_ANSWER, lambda what: self.refusal(f"sent {what}", "check its log")),
        )
        self.name, self.kind = self.served()

    def served(self) -> tuple[str, str]:
        """Return the name of the served model, and the kind of server: vllm or sglang."""
        try:
            model = self.ask("/v1/models")["data"][0]
            name, kind = model["id"], model["owned_by"]
            if not isinstance(name, str):
                raise TypeError(name)
        except (LookupError, TypeError) as error:
            raise self.refusal("lists no model at /v1/models", "start vLLM or SGLang there") from error
        if kind not in ("vllm", "sglang"):
            raise self.refusal(f"is owned by {kind!r:.50}", "only vLLM and SGLang accept new weights")
        return name, kind

    def reload(self, directory: Path) -> None:
        """Make the server load the weights in a directory and drop its cache of the old ones."""
        if self.kind == "vllm":
            rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            self.ask("/collective_rpc", rpc, advice="start vLLM with VLLM_SERVER_DEV_MODE=1")
            done = self.ask("/reset_prefix_cache", {}, advice="start vLLM with VLLM_SERVER_DEV_MODE=1")
        else:
            done = self.ask(
                "/update_weights_from_disk", {"model_path": str(directory)}, advice="make the directory readable for it"
            )
        if not isinstance(done, dict) or done.get("success") is not True:
            raise self.refusal(f"did not load the weights in {directory}", "check its log")
        self.name, self.kind = self.served()  # SGLang now names the model after the directory

    def write(
        self,
        query: Tensor,
        query_mask: Tensor,
        max_new_tokens: int,
        temperature: float,
        eos_id: int,
        pad_id: int,
        uniforms: Tensor,
        vocab_size: int,
        forbidden: frozenset[int],
        stop_ids: list[int],
    ) -> tuple[Tensor, Tensor]:
        """Run `generate` on the server: query (b, Q), uniforms (b, T) -> response (b, T), logprobs (b, T).

        stop_ids end a response; EOS is one of them. The first uniform of a row becomes the seed of its request.
        """
        settings = {
            "model": self.name, "max_tokens": max_new_tokens, "temperature": temperature, "top_p": 1.0, "top_k": -1,
            "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1,
            "stop_token_ids": stop_ids, "skip_special_tokens": False, "return_token_ids": True, "logprobs": 1,
        }  # fmt: skip
        if forbidden:
            settings["logit_bias"] = {str(number): -100.0 for number in sorted(forbidden)}
        rows = [ids[real].tolist() for ids, real in zip(query.cpu(), query_mask.cpu(), strict=True)]
        seeds = (uniforms[:, 0] * 2**53).long().tolist()

        def complete(prompt: list[int], seed: int) -> tuple[list[int], list[float]]:
            answer = self.ask("/v1/completions", {**settings, "prompt": prompt, "seed": seed})
            return self.checked(answer, prompt, max_new_tokens, stop_ids, vocab_size, forbidden)

        with ThreadPoolExecutor(min(AT_ONCE, len(rows))) as pool:
            completions = list(pool.map(complete, rows, seeds))
        response = torch.full((len(rows), max_new_tokens), pad_id)
        logprobs = torch.zeros(response.shape)
        for b, (ids, token_logprobs) in enumerate(completions):
            response[b, : len(ids)], logprobs[b, : len(ids)] = torch.tensor(ids), torch.tensor(token_logprobs)
        return response.to(query.device), logprobs.to(query.device)

    def checked(
        self, answer: Any, prompt: list[int], T: int, stop_ids: list[int], vocab_size: int, forbidden: frozenset[int]
    ) -> tuple[list[int], list[float]]:
        """Return a completion's ids and log-probabilities; raise InputError if the policy can't have written it."""
        try:
            (choice,) = answer["choices"]
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            read, reason = choice["prompt_token_ids"], str(choice["finish_reason"])
            good = isinstance(ids, list) and all(type(number) is int for number in ids)
            good &= all(-math.inf < number <= ROUNDING for number in logprobs)
            good &= len(ids) == len(logprobs) > 0 and isinstance(read, list | None)
        except (LookupError, TypeError, ValueError):
            good = False
        if not good:
            raise self.refusal(
                "returned no token_ids with a log-probability each", "use a version that knows return_token_ids"
            )
        if read != prompt:
            raise self.refusal(
                f"read a prompt of {len(read or [])} ids, not the {len(prompt)} sent", "stop it from adding tokens"
            )
        strange = next((number for number in ids if not 0 <= number < vocab_size or number in forbidden), None)
        if strange is not None:
            raise self.refusal(
                f"wrote the id {strange!s:.40}, which the policy can't emit", "serve a model with its tokenizer"
            )
        if not {*stop_ids}.isdisjoint(ids[:-1]) or len(ids) > T or (len(ids) < T and ids[-1] not in stop_ids):
            raise self.refusal(
                f"wrote {len(ids)} of {T} ids and stopped ({reason:.40}) without EOS or after it", "raise its context "
                "length and remove its stop settings",
            )  # fmt: skip
        return ids, logprobs

    def ask(self, path: str, body: dict | None = None, advice: str = "check its log") -> Any:
        """Return the JSON answer to a GET, or to a POST of `body`; retry while the server is down or busy."""
        for wait in (*WAITS, None):
            try:
                answer = self.client.request("GET" if body is None else "POST", self.url + path, json=body)
                if answer.status_code == 200:
                    return answer.json() if answer.content else None
                problem = f"answered {answer.status_code} to {path}{error_excerpt(answer.content)}"
                is_passing = answer.status_code in (429, 502, 503, 504)
            except httpx2.TimeoutException:
                raise self.refusal(f"did not answer {path} in {TIMEOUT:.0f} s", "reduce its load") from None
            except (ValueError, RecursionError) as error:
                raise self.refusal(f"answered {path} with no JSON", "start vLLM or SGLang there") from error
            except httpx2.HTTPError as error:  # connection refused or reset, unknown host, not HTTP
                reason = " ".join(str(error).split()).rstrip(".")
                problem, is_passing = f"gave no answer to {path} ({reason:.100})", True
                advice = "start it, or check host and port"
            if wait is None or not is_passing:
                raise self.refusal(problem, advice)
            time.sleep(wait)
        raise AssertionError

    def refusal(self, problem: str, advice: str) -> InputError:
        return InputError(f"--sampler.url {self.url} {problem}: {advice}.")


def error_excerpt(text: bytes) -> str:
    """Return the beginning of a server's error message, on one line."""
    line = " ".join(text[:2000].decode(errors="replace").split()).rstrip(".")
    return f" ({line:.300})" if line else ""

"""Compile every Triton kernel for Ampere and Hopper, without a device: `python -m tools.compile_kernels`.

test_compile.py runs it in a separate process, as the interpreter that the other tests use replaces Triton's compiler
for the whole process. Prints one line per kernel: architecture, name, settings, bytes of shared memory. Ampere gets the
first of the settings to choose from, Hopper, with more shared memory, the last.
"""

import importlib

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

gae, kl, logprobs = (importlib.import_module(f"kernels.{name}") for name in ("gae", "kl", "logprobs"))
FLOATS = ("gamma", "decay", "kl_coef", "inverse_temperature", "cap")
INTEGERS = ("N", "V", "C", "T", "first")
OF_MODEL = ("hidden", "weight", "logits", "ref_logits", "grad")  # in the model's dtype; everything else is float32


def compile_kernel(kernel, architecture: int, dtype: str, settings: dict, num_warps: int = 4, num_stages: int = 3):
    signature = {}
    for name in kernel.arg_names:
        if name in settings:
            signature[name] = "constexpr"
        elif name in FLOATS:
            signature[name] = "fp32"
        elif name in INTEGERS:
            signature[name] = "i32"
        elif name in ("labels", "eos_indices"):
            signature[name] = "*i64"
        else:
            signature[name] = f"*{dtype}" if name in OF_MODEL else "*fp32"
    constants = {(kernel.arg_names.index(name),): value for name, value in settings.items()}
    binary = triton.compile(
        ASTSource(kernel, signature, constexprs=constants),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    assert binary.asm["cubin"]
    print(architecture, kernel.__name__, dtype, settings, binary.metadata.shared)


def main(architecture: int, which: int) -> None:
    compile_kernel(gae.gae_kernel, architecture, "fp32", {"BLOCK": gae.BLOCK})
    for dtype in ("fp32", "bf16"):
        config = kl.kl_kernel.configs[which]
        compile_kernel(kl.kl_kernel.fn, architecture, dtype, config.kwargs, config.num_warps)
    for tuner, more in (
        (logprobs.linear_forward_kernel, {"SPLIT": logprobs.SPLIT}),
        (logprobs.linear_backward_kernel, {}),
    ):
        config, dtype, precision = tuner.configs[which], *(("fp32", "ieee") if which == 0 else ("bf16", "tf32"))
        settings = {**config.kwargs, **more, "PRECISION": precision, "HAS_BIAS": dtype == "bf16"}
        for has_cap in (False, True):
            settings["HAS_CAP"] = has_cap
            compile_kernel(tuner.fn, architecture, dtype, settings, config.num_warps, config.num_stages)


if __name__ == "__main__":
    main(80, 0)
    main(90, -1)

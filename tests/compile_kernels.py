"""Compile every Triton kernel for an architecture, without a device: `python tests/compile_kernels.py 90`.

test_compile.py runs it in a separate process, as the interpreter that the other tests use replaces Triton's compiler
for the whole process. Prints one line per kernel: name, settings, bytes of shared memory.
"""

import importlib
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

gae, kl, logprobs = (importlib.import_module(f"kernels.{name}") for name in ("gae", "kl", "logprobs"))
FLOATS = ("gamma", "decay", "kl_coef", "inverse_temperature")
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
    print(kernel.__name__, dtype, settings, binary.metadata.shared)


def main(architecture: int) -> None:
    for kernel, flags in (
        (gae.gae_kernel, [{}]),
        (gae.penalised_gae_kernel, [{"AFTER_EOS": x} for x in (True, False)]),
    ):
        for flag in flags:
            compile_kernel(kernel, architecture, "fp32", {"BLOCK": gae.BLOCK, **flag})
    for tuner in (
        logprobs.logits_forward_kernel, logprobs.logits_backward_kernel, kl.kl_forward_kernel, kl.kl_backward_kernel
    ):  # fmt: skip
        for dtype in ("fp32", "bf16"):
            for config in (tuner.configs[0], tuner.configs[-1]):
                compile_kernel(tuner.fn, architecture, dtype, config.kwargs, config.num_warps)
    for tuner, more in (
        (logprobs.linear_forward_kernel, {"SPLIT": logprobs.SPLIT}),
        (logprobs.linear_backward_kernel, {}),
    ):
        for dtype, precision, configs in (("fp32", "ieee", tuner.configs[:1]), ("bf16", "tf32", tuner.configs[-1:])):
            for config in configs:
                settings = {**config.kwargs, **more, "PRECISION": precision, "HAS_BIAS": dtype == "bf16"}
                compile_kernel(tuner.fn, architecture, dtype, settings, config.num_warps, config.num_stages)


if __name__ == "__main__":
    main(int(sys.argv[1]))

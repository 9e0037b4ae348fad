"""The parts of gpu.py: what each shows, what it costs, and the function that yields its rows."""

from __future__ import annotations

from dataclasses import dataclass

TOGETHER, ALONE, ON_REQUEST = "A", "B", ""


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        phase: "A", whose parts time nothing and run together; "B", one by one; "" runs where it is named alone.
        expected_s: on an H100 with empty caches.
        limit_s: after which it is killed.
        function: "module:function", which takes a Setting and yields rows.
        about: what `--list` says of it.
    """

    phase: str
    expected_s: float
    limit_s: float
    function: str
    about: str


PARTS: dict[str, Part] = {
    "bits-kernels": Part(TOGETHER, 60, 110, "gpu_kernels:bits", "kernels against the CPU reference, bit for bit"),
    "train-bits": Part(TOGETHER, 90, 110, "gpu_training:train_bits", "README's script against plain PyTorch"),
    "loopback-bits": Part(
        TOGETHER, 70, 110, "gpu_loopback:loopback_bits", "8 ranks on one GPU: late collectives change no bit"
    ),
    "offload-bits": Part(TOGETHER, 90, 110, "gpu_offload_bits:offload_bits", "on host and disk: the same bits"),
    "graph-bits": Part(TOGETHER, 60, 110, "gpu_training:graph_bits", "steps as CUDA graphs: the same bits"),
    "gloo-two": Part(TOGETHER, 40, 110, "gpu_ranks:gloo_two", "two gloo ranks: resumed bitwise"),
    "nccl-two": Part(TOGETHER, 60, 110, "gpu_ranks:nccl_two", "two NCCL ranks on one GPU: the bits of gloo"),
    "ceilings": Part(ALONE, 15, 30, "gpu_ceilings:ceilings", "what the machine can do at most; calibrate()"),
    "kernels": Part(ALONE, 25, 45, "gpu_kernels:times", "compression kernels beside a copy of as many bytes"),
    "step": Part(ALONE, 120, 160, "gpu_step:steps", "GPT-2 small and a Llama 3 8B layer beside torch.compile, FSDP2"),
    "peaks": Part(ALONE, 50, 70, "gpu_peaks:peaks", "predicted and measured peaks"),
    "offload": Part(ALONE, 60, 90, "gpu_offload:offload", "state on the host, hidden or not, beside FSDP2"),
    "overlap": Part(ALONE, 90, 120, "gpu_loopback:overlap", "8 ranks and an emulated link: exposed time"),
    "large-bucket": Part(ON_REQUEST, 15, 60, "gpu_kernels:large_bucket", "one bucket above 2^31 elements"),
    "sanitizer": Part(ON_REQUEST, 240, 420, "gpu_kernels:sanitizer", "the kernels under compute-sanitizer"),
}

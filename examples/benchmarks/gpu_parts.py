"""The parts of gpu.py in their order: each yields rows of figures, and of checks that held or did not."""

from __future__ import annotations

from gpu_kernels import run_kernels, run_large_bucket, run_sanitizer
from gpu_offload import run_offload
from gpu_overlap import run_overlap
from gpu_profiles import run_profile_gpt, run_profile_llama
from gpu_resume import run_resume
from gpu_setting import Part
from gpu_training import run_nccl, run_train

PARTS: dict[str, Part] = {
    "kernels": Part("kernels against the CPU reference, bit for bit, and against a copy", run_kernels),
    "large-bucket": Part("one bucket above 2^31 elements", run_large_bucket),
    "sanitizer": Part("the kernels under compute-sanitizer, where it is installed", run_sanitizer),
    "train": Part("README's script in four precisions against plain PyTorch; predicted and real peak", run_train),
    "overlap": Part("eight ranks looped back on the device: step, exposed and predicted time", run_overlap),
    "offload": Part("parameters and state on the host: the same bits, predicted and real peak, time", run_offload),
    "resume": Part("two gloo ranks share the device: resumed with dropout and LoCo, bitwise", run_resume),
    "profile-gpt": Part("GPT-2 124M: gaps between islands against one Inductor graph", run_profile_gpt),
    "profile-llama": Part("one layer of Llama 3 8B: the same", run_profile_llama),
    "nccl": Part("NCCL with one rank and device_id", run_nccl),
}

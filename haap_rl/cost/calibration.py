"""The constants of the cost model, in one place, each with where it comes from.

They are data-sheet or literature values, not fitted: expect the order of plans to be better than the seconds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants shared by compute, comm, memory and schedule. Shares are fractions between 0 and 1."""

    # Share of the peak reached by a very large matrix product. Published best matmuls: A100 271 of 312 TFLOP/s, H100
    # 795 of 989 (ml-engineering, "MAMF"); a training kernel stays somewhat below.
    gemm_efficiency: float = 0.8
    # (device name prefix, efficiency) where it is known to be lower: T4 is power-limited at 70 W and the H100's
    # published best is 0.80 of the peak for its very best shape.
    gemm_efficiency_by_device: tuple[tuple[str, float], ...] = (("h100", 0.7), ("t4", 0.7))
    # A dimension of this size halves the efficiency of a matrix product; 200 is about 1.5 tiles of 128 (CUTLASS tile
    # sizes): wave and tile quantisation.
    gemm_half_size: float = 200.0
    # Share of the nominal memory bandwidth that a streaming kernel reaches (BabelStream on A100 and V100: 0.8-0.9).
    memory_bandwidth_share: float = 0.8
    # Host time to launch one layer's kernels, in each direction (about 100 launches at 5-10 us, PyTorch eager).
    host_layer_s: float = 1.0e-3
    # Host time per stage and micro-batch outside the layers: data, schedule, p2p set-up.
    host_microbatch_s: float = 1.0e-3
    # Share of a link's nominal bandwidth that collectives reach (nccl-tests bus bandwidth: NVLink 0.75-0.85, RDMA
    # networks 0.5-0.9).
    link_efficiency: float = 0.6
    # Share of the gradient synchronisation hidden behind the last backward passes (Megatron-LM buckets).
    gradient_sync_hidden: float = 0.3
    # Share of a boundary transfer that also occupies both stages: Megatron-LM waits for its batched sends.
    send_blocking: float = 0.8
    # Bytes moved per parameter by a mixed-precision Adam step: read fp32 master, both moments and gradient, write
    # master and moments, write the 16-bit weight (4 x 4 + 3 x 4 + 2).
    optimizer_bytes_per_parameter: float = 30.0
    # Memory kept back per device: CUDA context, NCCL buffers and workspaces ...
    reserve_bytes: int = 1_500_000_000
    # ... and the share of the memory lost to the allocator's fragmentation (Korthikanti et al. 2022 leave as much).
    fragmentation: float = 0.06

    def efficiency_of(self, device_name: str) -> float:
        """Share of the peak that a very large matrix product reaches on the device type `device_name`."""
        for prefix, efficiency in self.gemm_efficiency_by_device:
            if device_name.startswith(prefix):
                return efficiency
        return self.gemm_efficiency


DEFAULT = Calibration()

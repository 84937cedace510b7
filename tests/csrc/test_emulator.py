"""The emulator that runs CUDA kernels on the host does what a GPU does, and finds what a GPU may forgive."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.cuda_host import (
    ASCENDING,
    DESCENDING,
    SCHEDULES,
    HostLibrary,
    KernelError,
    compile_host,
    pointer,
    set_schedule,
    unwatched,
)

SOURCE = Path(__file__).with_name("emulator_kernels.cpp")
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
LANES = np.arange(32)
GROUP, PLACE = LANES // 4, 2 * (LANES % 4)


@pytest.fixture(scope="module")
def kernels() -> HostLibrary:
    """The kernels of emulator_kernels.cpp."""
    return compile_host(SOURCE)


@pytest.fixture(params=SCHEDULES)
def scheduled(request: pytest.FixtureRequest, kernels: HostLibrary) -> HostLibrary:
    """The kernels under each schedule in turn."""
    set_schedule(kernels, request.param)
    return kernels


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Integers, positive and negative, by a seed."""
    return torch.randint(-1000, 1000, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """The bits of 16-bit floating-point numbers."""
    return tensor.view(torch.int16).numpy().view(np.uint16)


def pairs(matrix: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Registers with ``matrix[row, column]`` below and ``matrix[row, column + 1]`` above."""
    return matrix[row, column] | (matrix[row, column + 1].astype(np.uint32) << 16)


# ---- threads, warps, matrices ----------------------------------------------------------------------------------------


def test_every_thread_of_every_block_knows_its_indices(scheduled: HostLibrary) -> None:
    out = torch.full((2, 3, 2, 40, 5), -1, dtype=torch.int32)  # z, y, x, thread
    scheduled.indices(pointer(out), 2, 3, 2, 40)
    expected = [[x, y, z, thread, 40] for z in range(2) for y in range(3) for x in range(2) for thread in range(40)]
    assert out.reshape(-1, 5).tolist() == expected


def test_warp_functions_give_what_cuda_says(scheduled: HostLibrary) -> None:
    value = numbers(32)
    out = torch.zeros(9, 32, dtype=torch.int32)
    scheduled.warp_functions(pointer(value), pointer(out))
    v, result = value.numpy(), out.numpy()
    positive = sum(1 << lane for lane in range(32) if v[lane] > 0)
    assert np.array_equal(result[0], v[LANES * 7 % 32])
    assert np.array_equal(result[1], v[LANES // 8 * 8 + 2])
    assert np.array_equal(result[2], v[LANES ^ 5])
    assert np.array_equal(result[3], v[np.where(LANES + 3 < 32, LANES + 3, LANES)])
    assert np.array_equal(result[4], v[np.where(LANES % 16 >= 3, LANES - 3, LANES)])
    assert np.array_equal(result[5].view(np.uint32), np.full(32, positive, np.uint32))
    assert result[6].tolist() == [1] * 32
    assert result[7].tolist() == [0] * 32
    assert result[8, :8].tolist() == [positive & 0xFF] * 8
    assert np.array_equal(result[8, 8:], v[LANES[8:] ^ 1])


@pytest.mark.parametrize("count", [2, 4])
def test_ldmatrix_gives_each_lane_two_neighbours_of_its_row_or_column(kernels: HostLibrary, count: int) -> None:
    values = torch.arange(4 * 64, dtype=torch.int16)
    straight, transposed = torch.zeros(2, 32, count, dtype=torch.int32).unbind()
    kernels.matrices(pointer(values), pointer(straight), count, 0)
    kernels.matrices(pointer(values), pointer(transposed), count, 1)
    matrices = values.numpy().view(np.uint16).reshape(4, 8, 8)
    for i in range(count):
        assert np.array_equal(straight[:, i].numpy().view(np.uint32), pairs(matrices[i], GROUP, PLACE))
        assert np.array_equal(transposed[:, i].numpy().view(np.uint32), pairs(matrices[i].T, GROUP, PLACE))


@HALVES
def test_mma_multiplies_fragments_as_the_ptx_manual_lays_them_out(kernels: HostLibrary, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(16, 16, generator=generator).to(dtype)
    b = torch.randn(16, 8, generator=generator).to(dtype)
    c = torch.randn(16, 8, generator=generator)
    a_bits, b_bits = bits_of(a), bits_of(b)
    a_registers = np.stack([pairs(a_bits, GROUP + r, PLACE + k) for k in (0, 8) for r in (0, 8)], axis=1)
    b_registers = np.stack([pairs(b_bits.T, GROUP, PLACE + k) for k in (0, 8)], axis=1)
    where = np.stack([GROUP, GROUP, GROUP + 8, GROUP + 8], 1), np.stack([PLACE, PLACE + 1, PLACE, PLACE + 1], 1)
    registers = torch.from_numpy(np.ascontiguousarray(c.numpy()[where]))
    fragments = [torch.from_numpy(np.ascontiguousarray(part).view(np.int32)) for part in (a_registers, b_registers)]
    kernels.product(pointer(fragments[0]), pointer(fragments[1]), pointer(registers), int(dtype == torch.bfloat16))
    expected = c.double() + a.double() @ b.double()
    np.testing.assert_allclose(registers.numpy(), expected.numpy()[where], rtol=2e-7)


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_mma_fit_together_as_mma_cuh_says(scheduled: HostLibrary, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    a = torch.randn(16, 16, generator=generator).half()
    b = torch.randn(*((16, 8) if transposed else (8, 16)), generator=generator).half()
    c = torch.zeros(16, 8)
    scheduled.product_of_rows(pointer(a), pointer(b), pointer(c), int(transposed))
    torch.testing.assert_close(c, (a.double() @ (b if transposed else b.T).double()).float(), rtol=2e-7, atol=1e-7)


# ---- numbers ---------------------------------------------------------------------------------------------------------


@HALVES
def test_all_halves_widen_as_in_torch(kernels: HostLibrary, dtype: torch.dtype) -> None:
    halves = torch.arange(65536).to(torch.uint16)
    wide = torch.empty(65536)
    kernels.widen(pointer(halves), pointer(wide), 65536, int(dtype == torch.bfloat16))
    expected = halves.view(dtype).float()
    number = ~expected.isnan()
    assert torch.equal(wide.isnan(), ~number)
    assert torch.equal(wide.view(torch.int32)[number], expected.view(torch.int32)[number])


@HALVES
def test_floats_round_to_the_nearest_half_as_in_torch(kernels: HostLibrary, dtype: torch.dtype) -> None:
    random = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(3), dtype=torch.int64)
    halves = torch.arange(65536).to(torch.uint16).view(dtype).float()
    ties = halves.view(torch.int32) + (1 << (12 if dtype == torch.float16 else 15))
    special = torch.tensor([0.0, -0.0, 65519.99, 65520.0, 65536.0, 3.4028235e38, float("inf"), float("nan"), 2.0**-25])
    near = torch.cat([ties - 1, ties, ties + 1, random.to(torch.int32)]).view(torch.float32)
    floats = torch.cat([special, -special, halves, halves * 2.0**-20, near, near.remainder(2.0**-14)])
    narrow = torch.empty(len(floats), dtype=torch.uint16)
    kernels.narrow(pointer(floats), pointer(narrow), len(floats), int(dtype == torch.bfloat16))
    number = ~floats.isnan()
    assert torch.equal(narrow.view(torch.int16)[number], floats.to(dtype).view(torch.int16)[number])
    assert narrow.view(dtype)[~number].isnan().all()


def test_pack2_puts_the_first_number_at_the_lower_address(kernels: HostLibrary) -> None:
    values = torch.tensor([1.5, -2.001])
    registers, unpacked = torch.zeros(2, dtype=torch.int32), torch.zeros(4)
    kernels.pack(pointer(values), pointer(registers), pointer(unpacked))
    memory = registers.view(torch.int16).view(2, 2)
    assert torch.equal(memory[0].view(torch.float16), values.half())
    assert torch.equal(memory[1].view(torch.bfloat16), values.bfloat16())
    assert torch.equal(unpacked, torch.cat([values.half().float(), values.bfloat16().float()]))


def philox_in_numpy(keys: np.ndarray, counters: np.ndarray, rounds: int) -> np.ndarray:
    """Philox4x32 of Salmon et al. (2011), written from the paper: keys (n, 2), counters (n, 4), uint32."""
    key, counter = keys.astype(np.uint64), counters.astype(np.uint64)
    word = np.uint64(0xFFFFFFFF)
    for _ in range(rounds):
        product0, product1 = counter[:, 0] * np.uint64(0xD2511F53), counter[:, 2] * np.uint64(0xCD9E8D57)
        left = (product1 >> np.uint64(32)) ^ counter[:, 1] ^ key[:, 0]
        right = (product0 >> np.uint64(32)) ^ counter[:, 3] ^ key[:, 1]
        counter = np.stack([left, product1 & word, right, product0 & word], axis=1)
        key = (key + np.array([0x9E3779B9, 0xBB67AE85], np.uint64)) & word
    return counter.astype(np.uint32)


def philox(kernels: HostLibrary, keys: np.ndarray, counters: np.ndarray, rounds: int) -> np.ndarray:
    words = torch.from_numpy(np.concatenate([keys, counters], axis=1).view(np.int32))
    out = torch.zeros(len(words), 4, dtype=torch.int32)
    kernels.philox(pointer(words), pointer(out), len(words), rounds)
    return out.numpy().view(np.uint32)


# Random123's known answers (kat_vectors): rounds, counter, key, result.
PI = "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0"
KNOWN_ANSWERS = [
    (7, "0 0 0 0", "0 0", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, *PI, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, "0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, *PI, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(kernels: HostLibrary, rounds: int, counter: str, key: str, result: str) -> None:
    def words(text: str) -> np.ndarray:
        return np.array([[int(word, 16) for word in text.split()]], np.uint32)

    assert np.array_equal(philox(kernels, words(key), words(counter), rounds), words(result))


@pytest.mark.parametrize("rounds", [7, 10])
def test_philox_agrees_with_the_paper(kernels: HostLibrary, rounds: int) -> None:
    words = np.random.default_rng(4).integers(0, 2**32, (1000, 6), dtype=np.uint32)
    keys, counters = np.ascontiguousarray(words[:, :2]), np.ascontiguousarray(words[:, 2:])
    assert np.array_equal(philox(kernels, keys, counters, rounds), philox_in_numpy(keys, counters, rounds))


# ---- what the schedules find -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["block", "warps"])
def test_a_missing_barrier_changes_the_result_under_every_schedule(kernels: HostLibrary, scope: str) -> None:
    value, span = numbers(128), 128 if scope == "block" else 32
    expected = value.view(-1, span).flip(1).flatten()
    wrong = []
    for seed in SCHEDULES:
        set_schedule(kernels, seed)
        for barrier in (1, 0):
            out = torch.zeros(128, dtype=torch.int32)
            with unwatched(kernels):
                kernels[f"reverse_{scope}"](pointer(value), pointer(out), 128, barrier)
            assert torch.equal(out, expected) == bool(barrier)
        wrong.append(tuple(out.tolist()))
    assert len(set(wrong)) == len(SCHEDULES)


@pytest.mark.parametrize("scope", ["block", "warps"])
def test_a_missing_barrier_is_a_race_under_every_schedule(scheduled: HostLibrary, scope: str) -> None:
    value, out = numbers(128), torch.zeros(128, dtype=torch.int32)
    scheduled[f"reverse_{scope}"](pointer(value), pointer(out), 128, 1)
    line = r"emulator_kernels\.cpp:\d+"
    with pytest.raises(KernelError, match=rf"race in byte \d+ .* thread \d+ (wrote|read) it at {line}, this thread"):
        scheduled[f"reverse_{scope}"](pointer(value), pointer(out), 128, 0)


def test_a_missing_wait_for_an_asynchronous_copy_shows(kernels: HostLibrary) -> None:
    value = numbers(64, 8)
    complete = value.clone()
    complete[1::2, 4:] = 0
    for seed in SCHEDULES:
        set_schedule(kernels, seed)
        results = []
        for pending in range(3):
            out = torch.zeros(64, 8, dtype=torch.int32)
            kernels.copy(pointer(value), pointer(out), 64, pending)
            results.append(out)
        assert torch.equal(results[0], complete)
        assert torch.equal(results[1][:, :4], value[:, :4])
        assert not torch.equal(results[1], complete)
        assert not torch.equal(results[2][:, :4], value[:, :4])


def test_unwritten_shared_memory_and_what_lies_behind_it_is_nan_in_every_format(kernels: HostLibrary) -> None:
    out = torch.zeros(3, 2, 3)
    with unwatched(kernels):
        kernels.unwritten(pointer(out), 3)
    assert out.isnan().all()


def test_a_seed_chooses_the_order_of_threads_and_blocks(kernels: HostLibrary) -> None:
    orders = {}
    for seed in (*SCHEDULES, SCHEDULES[-1]):  # the last one twice
        set_schedule(kernels, seed)
        out = torch.zeros(4 * 96, dtype=torch.int32)
        kernels.order(pointer(out), 4, 96)
        assert sorted(out.tolist()) == list(range(4 * 96))
        assert orders.setdefault(seed, out.tolist()) == out.tolist()
    assert orders[ASCENDING] == list(range(4 * 96))
    assert orders[DESCENDING] == list(range(4 * 96))[::-1]
    assert len({tuple(order) for order in orders.values()}) == len(SCHEDULES)


# ---- what ends a launch ----------------------------------------------------------------------------------------------

WRONG = {
    "write_where_others_write": "this thread writes it, and no barrier orders the two",
    "read_then_overwrite": "and no barrier orders the two",
    "load_before_all_stored": "and no barrier orders the two",
    "wait_only_for_own_copies": "and no barrier orders the two",
    "barrier_in_branches": "divergent barrier: arrives at __syncthreads",
    "shuffles_in_branches": "divergent warp: arrives at __shfl",
    "barrier_against_ballot": "deadlock: every thread that has not returned waits for another",
    "ballot_after_return": "waits for it in __ballot_sync",
    "ballot_of_half_a_warp": "the lanes 0xfffffffc have returned or do not exist",
    "mask_without_caller": "mask 0x0000ffff, which does not name the calling lane",
    "shuffle_from_outside": "__shfl_sync reads lane 20, which mask 0x0000ffff lacks",
    "load_unaligned": "which is not 16-byte aligned",
    "load_elsewhere": "which is in no buffer",
    "matrix_outside": "of the block's 64 bytes of shared memory",
    "write_outside": "writes at byte 64 of the block's 64 bytes of shared memory",
    "copy_without_wait": "returns with 1 cp.async it never waited for",
    "index_outside": "index 4 is outside of 'int [4]'",
    "read_odd": "for 'const unsigned int', which needs a multiple of 4",
    "shared_bytes": "launch with 204800 bytes of shared memory in a block",
    "threads": "launch with 1025 threads in a block",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_raises_and_says_why(kernels: HostLibrary, name: str) -> None:
    for seed in SCHEDULES:
        set_schedule(kernels, seed)
        with pytest.raises(KernelError) as caught:
            kernels[f"wrong_{name}"]()
        assert WRONG[name] in str(caught.value)


def test_a_message_names_the_block_the_thread_and_the_line(kernels: HostLibrary) -> None:
    set_schedule(kernels, ASCENDING)
    with pytest.raises(KernelError, match=r"^block \(0, 0, 0\), thread 0, .*emulator_kernels\.cpp:\d+: load16 of 0x"):
        kernels.wrong_load_unaligned()
    with pytest.raises(KernelError, match=r"(?s)deadlock.*from thread 0 on in __syncthreads.*thread 40 on in __ballot"):
        kernels.wrong_barrier_against_ballot()


def test_a_write_outside_of_shared_memory_shows_in_the_guard_too(kernels: HostLibrary) -> None:
    with unwatched(kernels), pytest.raises(KernelError, match="wrote outside of its shared memory"):
        kernels.wrong_write_outside()


def test_a_launch_of_no_block_fails_as_in_cuda(kernels: HostLibrary) -> None:
    with pytest.raises(KernelError, match=r"launch with a grid of \(0, 1, 1\) blocks"):
        kernels.indices(pointer(numbers(1)), 0, 1, 1, 32)


def test_a_failed_launch_leaves_the_next_one_alone(kernels: HostLibrary) -> None:
    with pytest.raises(KernelError):
        kernels.wrong_write_outside()
    test_every_thread_of_every_block_knows_its_indices(kernels)


def test_threads_switch_with_ucontext_where_there_is_no_faster_way(tmp_path: Path) -> None:
    source = tmp_path / "host.cpp"
    source.write_text(
        """
        #include "common/launch.cuh"
        struct Parameters { int* out; };
        __global__ void sum_of_neighbours(Parameters p) {
          auto* shared = reinterpret_cast<int*>(mlbench::shared_memory());
          shared[threadIdx.x] = static_cast<int>(threadIdx.x);
          __syncthreads();
          const int next = shared[(threadIdx.x + 1) % blockDim.x];
          p.out[threadIdx.x] = next + __shfl_xor_sync(0xFFFFFFFFu, next, 1);
        }
        extern "C" void run(int* out) { mlbench::launch(sum_of_neighbours, mlbench::Dim3{1}, 64, 256, {}, {out}); }
        """
    )
    library = compile_host(source, "-DMLBENCH_EMULATOR_UCONTEXT", "-O0", "-fno-sanitize=all")
    out = torch.zeros(64, dtype=torch.int32)
    for seed in SCHEDULES:
        set_schedule(library, seed)
        library.run(pointer(out.zero_()))
        following = [(thread + 1) % 64 for thread in range(64)]
        assert out.tolist() == [following[thread] + following[thread ^ 1] for thread in range(64)]


def test_cpp_that_does_not_compile_fails_with_the_compilers_words(tmp_path: Path) -> None:
    source = tmp_path / "host.cpp"
    source.write_text("#error no kernel here\n")
    with pytest.raises(AssertionError, match="no kernel here"):
        compile_host(source)

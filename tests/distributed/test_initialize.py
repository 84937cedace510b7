"""Joining and leaving a world, with real processes."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mlbench_core.distributed.environment import HostsEnvironment
from mlbench_core.distributed.pytorch import initialize
from mlbench_core.distributed.pytorch.settings import config_pytorch
from mlbench_core.errors import BackendError, ConfigurationError, MLBenchError, WorkerError
from mlbench_core.utils.pytorch import FCGraph, initialize_backends
from tests.helpers.forked import ForkedScript
from tests.helpers.processes import free_port

SCRIPT = """
import argparse, json, os, sys
import torch, torch.distributed as dist
from mlbench_core.utils.pytorch import initialize_backends

torch.set_num_threads(1)
parser = argparse.ArgumentParser()
parser.add_argument("--hosts")
parser.add_argument("--rank", type=int, default=-1)
parser.add_argument("--out")
args = parser.parse_args()
before = dict(os.environ)
results = []
for _ in range(2):  # the port is free again after the first world
    settings = {"ckpt_run_dir": args.out, "timeout_s": 60}
    with initialize_backends("gloo", args.hosts, args.rank, "WARNING", **settings) as world:
        rank, world_size, graph = world
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        results.append([rank, world_size, total.item(), os.environ["LOCAL_RANK"], str(graph)])
    assert not dist.is_initialized()
assert dict(os.environ) == before, "the environment was changed"
with open(os.path.join(args.out, f"{rank}.json"), "w") as file:
    json.dump(results, file)
"""


@pytest.fixture(autouse=True)
def no_launcher(no_leaks: None) -> Iterator[None]:
    """No launcher's variables; tests may set some, and they are gone afterwards."""
    with mock.patch.dict(os.environ):
        for name in list(os.environ):
            if name.startswith(("SLURM_", "OMPI_", "PMI_", "MASTER_")) or name in (
                "RANK",
                "WORLD_SIZE",
            ):
                del os.environ[name]
        yield


def _finish(*running: ForkedScript) -> None:
    """All must end well."""
    try:
        done = [script.finish(timeout_s=240) for script in running]
        assert [one.returncode for one in done] == [0] * len(done), "".join(
            one.stdout + one.stderr for one in done
        )
    finally:
        for script in running:
            script.kill()


def _expected(rank: int) -> list[list[object]]:
    return [[rank, 2, 3.0, str(rank), f"FCGraph(rank={rank}, world_size=2, device=cpu)"]] * 2


def test_two_workers_by_hosts_and_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    common = [str(script), "--out", str(tmp_path), "--hosts", "127.0.0.1,127.0.0.1"]
    port = str(free_port())
    _finish(*(ForkedScript([*common, "--rank", str(rank)], MASTER_PORT=port) for rank in range(2)))
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == _expected(rank)


def test_two_workers_by_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT.replace("range(2)", "range(1)")
    )  # torchrun's own store lasts for one world
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    _finish(ForkedScript([*torchrun, str(script), "--out", str(tmp_path)]))
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == _expected(rank)[:1]


def test_two_workers_by_the_variables_of_mpirun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    common = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_PORT": str(free_port()),
    }
    _finish(
        *(
            ForkedScript(
                [str(script), "--out", str(tmp_path)],
                OMPI_COMM_WORLD_RANK=str(rank),
                OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
                **common,
            )
            for rank in range(2)
        )
    )
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == _expected(rank)


def test_alone() -> None:
    before = dict(os.environ)
    with initialize_backends("gloo", seed=0) as (rank, world_size, graph):
        assert (rank, world_size, str(graph)) == (0, 1, "FCGraph(rank=0, world_size=1, device=cpu)")
        assert isinstance(graph, FCGraph)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1, 1]
        drawn = torch.rand(1)
    assert signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN)
    assert not dist.is_initialized()
    assert dict(os.environ) == before
    config_pytorch(seed=0)
    assert torch.equal(drawn, torch.rand(1))


def test_an_optimizer_does_not_keep_the_process_group() -> None:
    script = """
import weakref, torch, torch.distributed as dist
from mlbench_core.distributed.pytorch import initialize_backends
with initialize_backends("gloo", logging_level="ERROR"):
    group = weakref.ref(dist.group.WORLD)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
assert group() is None
"""
    # A process that has not imported torch._dynamo yet.
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU for NCCL")
def test_a_world_over_nccl_warns_of_nothing() -> None:
    """Torch warns on standard error if it must guess the GPU of a collective operation."""
    script = (
        "import torch, torch.distributed as dist\nfrom "
        "mlbench_core.distributed.pytorch import initialize_backends\nwith "
        "initialize_backends('nccl', use_cuda=True, logging_level='WARNING') as (rank, "
        "size, graph):\n    x = torch.ones(3, device=graph.current_device)\n    "
        "dist.all_reduce(x)\n    print(dist.get_backend(), x.tolist())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240
    )
    assert (ended.stdout, ended.stderr) == ("nccl [1.0, 1.0, 1.0]\n", "")


def test_a_worker_that_waits_says_so_and_ends_at_ctrl_c() -> None:
    script = """
import signal
from mlbench_core.distributed.pytorch import initialize, initialize_backends
# A shell ignores it for commands in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
initialize._NOTICE_AFTER_S = 0.1
with initialize_backends("gloo", "127.0.0.1,127.0.0.1", 0, "WARNING", timeout_s=20):
    pass
"""
    variables = {**os.environ, "MASTER_PORT": str(free_port())}
    with subprocess.Popen(
        [sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, env=variables
    ) as waiting:
        assert waiting.stderr is not None
        text = next(line for line in waiting.stderr if "waits" in line)
        assert re.search(
            (
                r"rank 0 of 2 waits for the others at 127\.0\.0\.1:\d+, for up to 20 s; Ctrl-C "
                r"ends it$"
            ),
            text,
        )
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(60) == -signal.SIGINT


def test_workers_that_take_each_others_cores_are_warned(caplog: pytest.LogCaptureFixture) -> None:
    with (
        mock.patch("torch.get_num_threads", return_value=8),
        mock.patch("os.sched_getaffinity", return_value=range(16), create=True),
    ):
        for rank in range(4):
            initialize._warn_of_threads(HostsEnvironment("a,b,b,b", rank, {}))
    assert [record.getMessage() for record in caplog.records] == [
        "3 workers on b have 8 threads each, together more than its 16 cores, so they slow each "
        "other down: set OMP_NUM_THREADS=5 for each"
    ]


@pytest.mark.parametrize("hosts", [None, "127.0.0.1"])
def test_everything_is_torn_down_after_an_exception(hosts: str | None) -> None:
    before, handlers = dict(os.environ), list(logging.getLogger("mlbench").handlers)
    with (
        pytest.raises(ZeroDivisionError),
        initialize_backends("gloo", hosts, cudnn_deterministic=True, logging_level="ERROR"),
    ):
        assert torch.backends.cudnn.deterministic
        raise ZeroDivisionError
    assert not dist.is_initialized()
    assert dict(os.environ) == before
    assert logging.getLogger("mlbench").handlers == handlers
    assert not torch.backends.cudnn.deterministic


def test_folders(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "1_0.pth.tar").write_text("old")
    (folder / "notes").write_text("mine")
    log = tmp_path / "log"
    with initialize_backends(
        "GLOO", logging_file=log, ckpt_run_dir=folder, delete_existing_ckpts=True
    ):
        pass
    assert [path.name for path in folder.iterdir()] == ["notes"]
    assert log.exists()


def test_a_world_inside_a_world_is_refused() -> None:
    with initialize_backends("gloo"):
        with (
            pytest.raises(ConfigurationError, match="a process group already"),
            initialize_backends("gloo"),
        ):
            pass
        assert dist.is_initialized()


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("carrier_pigeon", "'carrier_pigeon' is unknown; known here are gloo, mpi, nccl"),
        ("nccl", "nccl works on GPUs only.*use gloo"),
    ],
)
def test_backends_that_cannot_work(backend: str, message: str) -> None:
    with (
        mock.patch("torch.cuda.device_count", return_value=0),
        pytest.raises(BackendError, match=message),
        initialize_backends(backend),
    ):
        pass


def test_arguments_that_cannot_work() -> None:
    with (
        pytest.raises(ValueError, match="rank is 2, but hosts names 2 workers"),
        initialize_backends("gloo", "a,b", 2),
    ):
        pass
    with (
        pytest.raises(ValueError, match="timeout_s must be finite and positive, not 0"),
        initialize_backends("gloo", timeout_s=0),
    ):
        pass
    with (
        mock.patch("torch.cuda.device_count", return_value=0),
        pytest.raises(ConfigurationError, match="sees no GPU"),
        initialize_backends("gloo", use_cuda=True),
    ):
        pass
    assert not dist.is_initialized()


@pytest.mark.parametrize("address", ["", "127.0.0.1"])
def test_a_port_in_use_is_named(address: str) -> None:
    with socket.socket() as listener:
        listener.bind((address, 0))
        listener.listen()
        port = listener.getsockname()[1]
        os.environ["MASTER_PORT"] = str(port)
        with (
            pytest.raises(MLBenchError, match=f"port {port}.*in use.*set MASTER_PORT"),
            initialize_backends("gloo", "127.0.0.1,127.0.0.1", 0, timeout_s=5),
        ):
            pass
    assert not dist.is_initialized()


def test_a_backend_that_cannot_start_is_not_called_absent_workers() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "nosuchif0"
    with (
        pytest.raises(
            BackendError,
            match=r"gloo cannot start here .*nosuchif0\): if GLOO_SOCKET_IFNAME is set, it must",
        ),
        initialize_backends("gloo"),
    ):
        pass
    assert not dist.is_initialized()


@pytest.mark.parametrize("rank", [0, 1])
def test_workers_that_do_not_come(rank: int) -> None:
    os.environ["MASTER_PORT"] = str(free_port())
    with (
        pytest.raises(
            WorkerError,
            match=rf"rank {rank} of 2 did not meet the other workers at 127.0.0.1:\d+ within 1 s",
        ),
        initialize_backends("gloo", "127.0.0.1,127.0.0.1", rank, timeout_s=1),
    ):
        pass
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("variables", "hosts", "remedy"),
    [
        (
            {
                "SLURM_PROCID": "1",
                "SLURM_NTASKS": "2",
                "SLURM_STEP_ID": "0",
                "SLURM_NODELIST": "no-such-host.invalid",
                "SLURM_JOB_ID": "7",
            },
            None,
            "set MASTER_ADDR to its IP address for every worker",
        ),
        ({}, "no-such-host.invalid,b", "name its IP address in --hosts"),
    ],
)
def test_an_address_that_does_not_resolve_is_a_sentence_at_once(
    variables: dict[str, str], hosts: str | None, remedy: str
) -> None:
    os.environ.update(variables)
    with (
        mock.patch("mlbench_core.distributed.pytorch.initialize._RESOLVE_S", 0.1),
        pytest.raises(
            ConfigurationError,
            match=f"the host of rank 0, 'no-such-host.invalid' as .* knows: {remedy}",
        ),
        initialize_backends("gloo", hosts, 1 if hosts else -1),
    ):
        pass
    assert not dist.is_initialized()

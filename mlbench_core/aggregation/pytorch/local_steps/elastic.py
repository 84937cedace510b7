"""Average the changes of the workers that live at the moment, so that workers may die or join.

An aggregation takes part in a round in two or three calls::

    meet ------> agreed, connected, healed ---> (gather) ---> exchange or exchange_in_pairs
      a member that was behind has the state         sends, and waits for the outcome

A lost member makes a call fail. The worker then goes on to the outcome without sending more.
"""

from __future__ import annotations

import datetime
import io
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mlbench_core.aggregation.pytorch.aggregation import (
    AVG_WORLD,
    Aggregation,
    Denominator,
    trainable,
    weights_of,
)
from mlbench_core.aggregation.pytorch.decentralized import check_average, refuse_gradients
from mlbench_core.aggregation.pytorch.transport.messages import (
    by_dtype_and_device,
    divide,
    pack,
    unpack,
)
from mlbench_core.aggregation.pytorch.transport.names import (
    check_keys,
    copies_by_plain_name,
    is_buffer,
)
from mlbench_core.arguments import check_int
from mlbench_core.distributed.pytorch.elastic import Membership, Round

__all__ = ["ElasticAverage"]

_log = logging.getLogger(__name__)


class ElasticAverage(Aggregation):
    r"""Average over the members of a round, which the workers agree on in every call.

    With :math:`\theta` the weights after the last committed round, :math:`\theta_i` those of member
    :math:`i`, and :math:`w_i` 1, or 0 for a member that has just received the shared state,

    .. math:: \theta_i \leftarrow \theta - \frac{\sum_i w_i (\theta - \theta_i)}{\sum_i w_i}.

    The numerator and the denominator travel in one message. If a member is lost before all have
    reported the sum, the round is not committed: no worker applies it, and
    :math:`\theta_i \leftarrow \theta`. So a lost worker costs the others at most the steps since
    the last round. Their inner optimizers keep their state. The methods that use this average have
    the same rounds, for a fragment of the weights or in pairs instead of a sum.

    A worker that joins, or that missed a round, receives the state of another member, the donor,
    before the sum: :math:`\theta`, an outer optimizer's momentum, the counts of steps and of
    tokens, the learning rates, and the parts given to :meth:`attach`. Of a method whose workers
    have states of their own, such as NoLoCo, it receives those of the donor. It keeps its own state
    of the inner optimizer, which is zero for a new worker.

    Give it to an optimizer with local steps: ``LocalSGD(..., aggregation=average)`` or
    ``DiLoCo(..., aggregation=DiLoCoAggregation(elastic=average))``. The aggregations of
    StreamingDiLoCo and NoLoCo have the argument ``elastic``, too. Each worker is a world of its
    own, so no other function communicates. All have the same model, and start from equal weights.

    Messages travel in the host's memory, one for each dtype, and sums in at least float32. A call
    sends the bytes of the tensors, and one number more in each sum.

    Attributes:
        membership: As given.
        tokens: Number of tokens, or samples, in the committed rounds of all workers. With fragments
            it is not exact, because a round counts the steps since the round before as a whole,
            though it sends one fragment of their progress. So a round that is not committed leaves
            out steps of which the other fragments keep the progress. And steps of a worker that
            dies may count, though its other fragments never travel.

    Args:
        membership: This worker's part in the rounds.

    Raises:
        ValueError: This process belongs to a process group of several workers.

    Example:
        >>> from torch import nn
        >>> from torch.distributed import HashStore
        >>> from mlbench_core.optim.pytorch import LocalSGD
        >>> model = nn.Linear(1, 1)
        >>> with Membership(HashStore(), worker=0, first_workers=1) as membership:
        ...     average = ElasticAverage(membership)
        ...     optimizer = LocalSGD(model=model, lr=0.1, period=2, aggregation=average)
        ...     average.attach(optimizer)
        ...     _ = average.join()
        ...     for _ in range(4):
        ...         model(torch.ones(8, 1)).sum().backward()
        ...         average.count(tokens=8)
        ...         optimizer.step()
        >>> membership.commits, average.tokens
        (2, 32)

    References:
        torchft, https://github.com/meta-pytorch/torchft, whose outer step this follows; for the
        differences, see :class:`~mlbench_core.distributed.pytorch.elastic.Membership`.
    """

    takes_complex = False
    _named_state = ("shared",)
    # The other workers would never receive the gradients of a round that is not committed.
    agg_grad = refuse_gradients

    def __init__(self, membership: Membership) -> None:
        super().__init__()
        if self.world_size > 1:
            raise ValueError(
                f"the process group must have 1 worker for an elastic run, not {self.world_size}, "
                "because it ends with the first worker that dies: start each worker as a world "
                "of its own"
            )
        self.membership = membership
        self.tokens = 0
        self._counted = 0
        self._joins = False
        self._shared: dict[str, Tensor] = {}  # theta by name
        self._optimizer: Any = None
        self._trained: set[str] = set()
        self._parts: dict[str, Any] = {}
        # From the agreement to the outcome. Without a group, the round has failed.
        self._round: Round | None = None
        self._group: Any = None

    def attach(self, optimizer: Any, **parts: Any) -> None:
        """Use the weights of an optimizer's model as shared weights, and name a joiner's state.

        Call it before the first step, and before :meth:`join`.

        Args:
            optimizer: An optimizer of mlbench_core, with this aggregation. A joiner receives the
                options of its groups, such as the learning rate.
            **parts: Objects with ``state_dict`` and ``load_state_dict`` that are the same on all
                workers, such as a scheduler of the learning rate. A state consists of tensors,
                numbers, texts, lists and dictionaries.
        """
        self._optimizer, self._parts = optimizer, parts
        model = optimizer.model
        self._trained = {name for name, _ in trainable(model)}
        outer = getattr(self._inside(), "start", None)
        if outer is not None:
            outer(model)
        for name, tensor in weights_of(model).items():
            # The outer optimizer has those of all parameters.
            if outer is None or is_buffer(name):
                self._shared.setdefault(name, tensor.clone())

    def join(self) -> bool:
        """Receive the shared state if the run has begun without this worker; else do nothing.

        It waits for the next round of the others, and takes part in it with weight 0.

        Returns:
            True if it has received the state. The others are then within a step of their
            optimizers: a scheduler that steps after each of these must step once.

        Raises:
            RuntimeError: :meth:`attach` was not called.
            WorkerError: The run has ended, or the store of the workers does not answer.
        """
        self._check_attached()
        joins = self._joins = self.membership.has_begun()
        # A round that fails leaves this worker without the state, and it tries the next one.
        while joins and self.membership.commits == 0:
            self._inside().agg_model()(self._optimizer.model, AVG_WORLD)
        self._joins = False
        return joins

    def count(self, tokens: int) -> None:
        """Count tokens, or samples, of a step; they enter the total if the round is committed.

        Args:
            tokens: Their number on this worker.
        """
        self._counted += check_int("tokens", tokens, least=0)
        self.membership.counted += tokens

    @torch.no_grad()
    def aggregate(
        self, tensors: Mapping[str, Tensor], op: str, denom: Denominator | None = None
    ) -> None:
        """Replace every tensor by the members' average, or by that of the last committed round.

        Args:
            tensors: By name, with the same shapes and dtypes on every worker.
            op: ``"avg_world"``.
            denom: Not used.

        Raises:
            UnknownOperationError: ``op`` is another one.
            WorkerError: The store of the workers does not answer.
        """
        check_average(op)
        self.meet(tensors)
        self.exchange({}, tensors)

    @torch.no_grad()
    def meet(self, weights: Mapping[str, Tensor], steps: int = 0) -> bool:
        """Agree on the next round, and receive the shared state if this worker is behind.

        Args:
            weights: All weights of this worker, by name. If it is behind, those that this object
                keeps become the shared ones.
            steps: Number of steps in this worker's state, if they say which of the weights travel;
                see :meth:`~mlbench_core.distributed.pytorch.elastic.Membership.agree`.

        Returns:
            True if this worker has received the state.

        Raises:
            RuntimeError: :meth:`attach` was not called.
            ValueError: Weights are missing.
            WorkerError: The store of the workers does not answer.
        """
        self._check_attached()
        if not self._trained <= weights.keys():
            raise ValueError(
                "by_layer must be False, because a round is committed for the whole model: leave "
                "it out, and train no parameters outside the model"
            )
        state = None
        # Before the first commit, all have the same number of rounds: a joiner has fewer steps.
        if self._joins:
            steps = -1
        self._round = round_ = self.membership.agree(self._counted, steps)
        try:
            self._group = self.membership.connect(round_)
            state = self._heal(self._group, round_)
        except RuntimeError as error:  # the type that Gloo raises
            # Without the group, this worker cannot have the sum.
            self._group = None
            _warn(round_, error)
        if state is None:
            return False
        self._load_shared(state)
        self.membership.commits = round_.commits
        for name in weights.keys() & self._shared.keys():
            weights[name].copy_(self._shared[name])
        return True

    def gather(self, row: Tensor) -> tuple[Tensor, int]:
        """Return the rows of all members that were not behind, and the position of the own one.

        Call it between :meth:`meet` and the exchange. If this worker was behind, or the round has
        failed, return the own row alone.

        Args:
            row: Of the same length and dtype on all members, in the host's memory.
        """
        assert self._round is not None
        members, others = self._round.members, self._others()
        if self._group is None:
            return row[None], 0
        rows = row.new_empty(len(members), len(row))
        options = torch.distributed.distributed_c10d.AllgatherOptions()
        options.timeout = datetime.timedelta(seconds=self.membership.timeout_s)
        try:
            self._group.allgather([list(rows)], [row], options).wait()
        except RuntimeError as error:
            self._group = None
            _warn(self._round, error)
            return row[None], 0
        self._count("all_gather", len(members), row.nbytes)
        if self.membership.worker not in others:
            return row[None], 0
        positions = [members.index(worker) for worker in others]
        return rows[positions], others.index(self.membership.worker)

    def _others(self) -> list[int]:
        """Return the members of the round that were not behind."""
        assert self._round is not None
        return [worker for worker in self._round.members if worker not in self._round.behind]

    def exchange(self, changes: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
        """End the round with the averages of all members. Call :meth:`meet` before.

        Args:
            changes: Changes of weights that the caller keeps, by name. They become the average of
                all members, or 0 if the round is not committed.
            weights: By name. They become the shared weights after the round.

        Returns:
            True if the round was committed.

        Raises:
            WorkerError: The store of the workers does not answer.
        """
        deltas = dict(changes)
        for name, tensor in weights.items():
            self._keep(name, tensor)
            deltas[name] = self._shared[name] - tensor
        # An order of names: that of a joiner's tensors may be another one.
        kinds = by_dtype_and_device([deltas[name] for name in sorted(deltas)])
        messages: list[Tensor] = []

        def send(group: Any, round_: Round) -> None:
            for kind in kinds:
                messages.append(self._sum(group, round_, kind))

        committed = self._finish(send)
        for tensor in deltas.values():
            tensor.zero_()
        if committed:
            for kind, message in zip(kinds, messages, strict=True):
                # The last number of a message is the sum of the weights: 1 for each member that was
                # not behind.
                unpack(divide(message[:-1], message[-1]).to(kind[0].device), kind)
        for name, tensor in weights.items():
            self._shared[name] -= deltas[name]
            tensor.copy_(self._shared[name])
        return committed

    def exchange_in_pairs(
        self,
        values: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        draw: Callable[[int, int], int | None],
    ) -> bool:
        """End the round with the averages of two members each. Call :meth:`meet` before.

        A member that has just been healed is alone.

        Args:
            values: By name. They become the average of the pair if the round is committed, and
                stay as they are otherwise.
            weights: By name. They become the average of the pair, or this worker's weights after
                the last committed round.
            draw: Takes a rank among the other members and their number. It returns the rank of the
                peer, or None if the member is alone.

        Returns:
            True if the round was committed, and this worker was not healed in it.

        Raises:
            WorkerError: The store of the workers does not answer.
        """
        assert self._round is not None
        others, rank = self._others(), None
        if self.membership.worker in others:
            peer = draw(others.index(self.membership.worker), len(others))
            if peer is not None:
                # The draw numbers only members that were not behind; the group numbers all of them.
                rank = self._round.members.index(others[peer])
        for name, tensor in weights.items():
            self._keep(name, tensor)
        tensors = {**values, **weights}
        # An empty tensor needs no message.
        kinds = by_dtype_and_device(
            filter(torch.numel, [tensors[name] for name in sorted(tensors)])
        )
        averages: list[Tensor] = []

        def send(group: Any, round_: Round) -> None:
            for kind in kinds:
                averages.append(self._average_with(group, rank, kind))

        committed = self._finish(send)
        if committed:
            for kind, average in zip(kinds, averages, strict=True):
                unpack(average.to(kind[0].device), kind)
        for name, tensor in weights.items():
            if committed:
                self._shared[name].copy_(tensor)
            else:
                tensor.copy_(self._shared[name])
        return committed and self.membership.worker in others

    def _keep(self, name: str, tensor: Tensor) -> None:
        """Begin to keep the shared weights of a tensor that was not in the model at first."""
        if name not in self._shared:
            self._shared[name] = tensor.clone()

    def _finish(self, send: Callable[[Any, Round], None]) -> bool:
        """Send the messages of the round, and return True if it is committed."""
        round_, group, has_sum = self._round, self._group, False
        assert round_ is not None
        self._round = self._group = None
        if group is not None:
            try:
                send(group, round_)
                has_sum = True
            except RuntimeError as error:
                _warn(round_, error)
        group = None  # its connections close when nothing refers to it
        committed = self.membership.commit(round_, has_sum)
        if committed:
            self.tokens += round_.tokens
        # After a round that is not committed, their steps are lost. With fragments, the progress of
        # the other fragments is not, but no count says which part of a step it is.
        self._counted = 0
        return committed

    def _heal(self, group: Any, round_: Round) -> dict[str, Any] | None:
        """Return the shared state if this worker is behind; send it to those behind as donor."""
        worker = self.membership.worker
        limit = datetime.timedelta(seconds=self.membership.timeout_s)
        if worker in round_.behind:
            donor = round_.members.index(round_.donor)
            # The length of a state is not known before, so the donor sends it first.
            length = torch.zeros(1, dtype=torch.int64)
            group.recv([length], donor, 0).wait(limit)
            content = torch.empty(int(length), dtype=torch.uint8)
            group.recv([content], donor, 0).wait(limit)
            file = io.BytesIO(content.numpy().tobytes())
            state: dict[str, Any] = torch.load(file, weights_only=True)
            return state
        if worker == round_.donor and round_.behind:
            file = io.BytesIO()
            torch.save(self._state_of_donor(), file)
            content = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
            for receiver in map(round_.members.index, round_.behind):
                for message in (torch.tensor([len(content)]), content):
                    group.send([message], receiver, 0).wait(limit)
                    self._count("pair", 2, message.nbytes)
        return None

    def _sum(self, group: Any, round_: Round, kind: list[Tensor]) -> Tensor:
        """Return the members' sum of tensors of one kind, flat, and the sum of the weights."""
        wide = torch.promote_types(kind[0].dtype, torch.float32)
        message = torch.cat([pack(kind).to("cpu", wide), torch.ones(1, dtype=wide)])
        if self.membership.worker in round_.behind:
            # Not a product: 0 times infinity is nan.
            message.zero_()
        options = torch.distributed.AllreduceOptions()
        options.timeout = datetime.timedelta(seconds=self.membership.timeout_s)
        group.allreduce([message], options).wait()
        self._count("all_reduce", len(round_.members), message.nbytes)
        return message

    def _average_with(self, group: Any, rank: int | None, kind: list[Tensor]) -> Tensor:
        """Return tensors of one kind, flat, averaged with those of a member, or the own ones."""
        own = pack(kind).cpu()
        if rank is None:
            return own
        received = torch.empty_like(own)
        limit = datetime.timedelta(seconds=self.membership.timeout_s)
        # Both start at once. In a blocking order, two members could wait for each other.
        for work in [group.send([own], rank, 0), group.recv([received], rank, 0)]:
            work.wait(limit)
        self._count("pair", 2, own.nbytes)
        # As DecentralizedAggregation does it: equal values stay the same, bit for bit.
        own = own.to(torch.promote_types(own.dtype, torch.float32))
        return own.add_(received.to(own).sub_(own), alpha=0.5)

    def _state_of_donor(self) -> dict[str, Any]:
        """Return what a joiner receives: the shared state, and what a method keeps per worker."""
        aggregation, options = self._optimizer.aggregation, []
        for group in self._optimizer.param_groups:
            options.append({key: value for key, value in group.items() if key != "params"})
        return {
            "aggregation": aggregation.state_dict(),
            "options": options,
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }

    def _load_shared(self, state: Mapping[str, Any]) -> None:
        self._optimizer.aggregation.load_state_dict(state["aggregation"])
        # A scheduler computes the next learning rate from that of the group.
        for group, options in zip(self._optimizer.param_groups, state["options"], strict=True):
            group.update(options)
        for name, part in self._parts.items():
            part.load_state_dict(state["parts"][name])

    def _check_attached(self) -> None:
        if self._optimizer is None:
            raise RuntimeError(
                "attach must be called before the first round: it names the state of a joiner"
            )

    def _inside(self) -> Any:
        """Return the aggregation that the optimizer calls after a period of local steps."""
        aggregation = self._optimizer.aggregation
        return getattr(aggregation, "inside", aggregation)

    def state_dict(self) -> dict[str, Any]:
        """Return the shared weights by name, and the numbers of tokens and of committed rounds."""
        return {
            "shared": dict(self._shared),
            "tokens": self.tokens,
            "commits": self.membership.commits,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; an empty state starts from zero.

        Raises:
            ValueError: It is another aggregation's state.
        """
        if state_dict:
            check_keys(self, state_dict, ("shared", "tokens", "commits"))
        self._shared = copies_by_plain_name(state_dict.get("shared", {}))
        self.tokens = int(state_dict.get("tokens", 0))
        self.membership.commits = int(state_dict.get("commits", 0))


def _warn(round_: Round, error: RuntimeError) -> None:
    reason = str(error).split("\n", 1)[0]
    _log.warning("round %d failed, maybe by a lost worker: %s", round_.number, reason)

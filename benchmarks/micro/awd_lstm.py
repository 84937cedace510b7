"""Time the training of AWD-LSTM: forward pass, loss, backward pass and SGD step, on random words.

The variants start from the same weights and run in one process:

* the classical model, of which this file has its own copy: a wrapper that makes a dropped copy of
  each recurrent weight before every call, a mask over the whole embedding matrix, and masks
  expanded over time;
* our model with that wrapper around its LSTMs, which shows the share of the wrapper;
* our model, whose loss is computed in pieces on a CPU;
* the three matrix products that give the scores of all words and their gradients, and nothing else:
  a bound, because every model of this vocabulary needs them;
* these products and torch's LSTM layers, forward and backward without dropout: a closer bound.

Dropout is random, so a test compares the models, and not this script.

    python benchmarks/micro/awd_lstm.py [--preset full] [--gpu] [--save]
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from _bench import Subject, finish, make_parser, measure, parse, positive
from torch import Tensor, nn

from mlbench_core.distributed.pytorch.memory import keep_freed_memory
from mlbench_core.models.pytorch.language_models import LSTMLanguageModel, detached

CLASSICAL = "classical: copies of weights, whole-matrix masks"
PRODUCTS = "bound: the matrix products of the scores alone"
BOUND = "bound: these products and torch's LSTM layers"
PRESETS = {
    "full": (400, 1150, 3,
             {"dropout": 0.4, "dropouth": 0.2, "dropouti": 0.65, "dropoute": 0.1, "wdrop": 0.5}),
    "small": (200, 400, 2,
              {"dropout": 0.2, "dropouth": 0.1, "dropouti": 0.2, "dropoute": 0.1, "wdrop": 0.1}),
}  # fmt: skip
SUBJECT = Subject(
    "awd_lstm",
    "Training a language model (`awd_lstm.py`)",
    "words/s",
    (CLASSICAL,),
    (
        "On a CPU, our model computes the loss in pieces, with the matrix products of oneDNN. "
        "On an AMD EPYC it is 1.67 (small) and 1.38 times (full) as fast as the classical one, "
        "whose products are those of MKL. It was not measured on an Intel Xeon. "
        "(Pieces with the products of MKL gave 1.19 and 1.01 times there, in commit 7a79481a5172.) "
        "On a GPU it is as fast as the classical one. "
        "All models need the products for the scores and torch's LSTM layers. "
        "A model that did only these would be 2.06 (small) and 1.60 times (full) as fast as the "
        "classical one on the EPYC, and 1.45 and 1.31 times on a GPU.",
        "Limits: at least 1.3 times on an AMD EPYC. "
        "On a GPU, the range of the ratio includes 1 or is above it. "
        "No model is faster than the bounds.",
    ),
)


class CopyingWeightDrop(nn.Module):
    """The usual wrapper: it renames the parameter, and sets a dropped copy before each call."""

    def __init__(self, module: nn.RNNBase, names: Sequence[str], dropout: float) -> None:
        super().__init__()
        self.module, self.names, self.dropout = module, names, dropout
        for name in names:
            raw = getattr(module, name)
            # The LSTM must not keep the parameter, because the copy takes its name.
            delattr(module, name)
            module.register_parameter(f"{name}_raw", nn.Parameter(raw.detach()))
            setattr(module, name, raw.detach().clone())

    def forward(self, *args: object) -> object:
        for name in self.names:
            raw = getattr(self.module, f"{name}_raw")
            setattr(self.module, name, F.dropout(raw, self.dropout, self.training))
        return self.module(*args)


class ClassicalModel(nn.Module):
    """The usual model around that wrapper: masks over the whole matrix, and expanded over time."""

    def __init__(self, model: LSTMLanguageModel) -> None:
        super().__init__()
        self.model = model

    def _locked(self, x: Tensor, p: float) -> Tensor:
        if not self.training or p == 0:
            return x
        mask = x.new_empty(1, x.size(1), x.size(2)).bernoulli_(1 - p) / (1 - p)
        return x * mask.expand_as(x)

    def forward(self, words: Tensor, hidden: list) -> tuple[Tensor, list]:
        model = self.model
        weight = model.encoder.weight
        if self.training and model.dropoute > 0:
            keep = 1 - model.dropoute
            mask = weight.new_empty(weight.size(0), 1).bernoulli_(keep)
            weight = mask.expand_as(weight) / keep * weight
        x = self._locked(F.embedding(words, weight), model.drop_input.p)
        ends = []
        for number, (rnn, state) in enumerate(zip(model.rnns, hidden, strict=True), start=1):
            x, state = rnn(x, state)
            drop = model.drop_hidden if number < model.nlayers else model.drop_output
            x = self._locked(x, drop.p)
            ends.append(state)
        return model.decoder(x.flatten(0, 1)), ends


def with_copies(model: LSTMLanguageModel) -> LSTMLanguageModel:
    """Put the usual wrapper around the LSTMs of a model."""
    for number, drop in enumerate(model.rnns):
        model.rnns[number] = CopyingWeightDrop(drop.module, drop.weights, drop.dropout)
    return model


def make_step(
    network: nn.Module, model: LSTMLanguageModel, words: Tensor, bf16: bool
) -> Callable[[], None]:
    """Make a function that takes a training step, and continues from the state of the last one."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    device = words.device
    hidden = [(h.to(device), c.to(device)) for h, c in model.init_hidden(words.shape[1])]

    def step() -> None:
        nonlocal hidden
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            if isinstance(network, LSTMLanguageModel):
                _, outputs, hidden = network.encode(words[:-1], detached(hidden))
                loss = network.loss(outputs[-1], words[1:].flatten())
            else:
                scores, hidden = network(words[:-1], detached(hidden))
                loss = F.cross_entropy(scores.float(), words[1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.25)
        optimizer.step()

    return step


def make_products(model: LSTMLanguageModel, words: Tensor, bf16: bool) -> Callable[[], None]:
    """Make a function that computes only the matrix products of the decoder, forward and backward.

    On a CPU in float32 they are oneDNN's, as in ``LSTMLanguageModel.loss``, but whole and not in
    pieces."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    weight = model.decoder.weight.detach().to(words.device, dtype).requires_grad_()
    options = {"device": words.device, "dtype": dtype}
    hidden = torch.randn(words[1:].numel(), weight.shape[1], **options, requires_grad=True)
    gradient = torch.randn(words[1:].numel(), weight.shape[0], **options)
    with_onednn = not words.is_cuda and not bf16 and torch.backends.mkldnn.is_available()

    def products() -> None:
        if with_onednn:
            scores = F.linear(hidden.to_mkldnn(), weight).to_dense()
        else:
            scores = F.linear(hidden, weight)
        torch.autograd.grad(scores, [hidden, weight], gradient)

    return products


def make_bound(model: LSTMLanguageModel, words: Tensor, bf16: bool) -> Callable[[], None]:
    """Make a function that computes decoder's products and LSTM layers, forward and backward."""
    products = make_products(model, words, bf16)
    dtype = torch.bfloat16 if bf16 else torch.float32
    layers = nn.ModuleList()
    for drop in model.rnns:
        layers.append(nn.LSTM(drop.module.input_size, drop.module.hidden_size))
    layers.to(words.device, dtype)
    options = {"device": words.device, "dtype": dtype}
    shape = words[1:].shape
    inputs = torch.randn(*shape, layers[0].input_size, **options, requires_grad=True)
    gradient = torch.randn(*shape, layers[-1].hidden_size, **options)

    def bound() -> None:
        products()
        outputs = inputs
        for layer in layers:
            outputs, _ = layer(outputs)
        torch.autograd.grad(outputs, [inputs, *layers.parameters()], gradient)

    return bound


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = make_parser(__doc__, blocks=9)
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), default="small")
    add("--vocabulary", type=positive, default=33_278)
    add("--batch-size", type=positive, default=20)
    add("--bptt", type=positive, default=70)
    add("--steps", type=positive, default=3, help="steps of a block")
    add("--bf16", action="store_true", help="forward and backward passes in bfloat16")
    add("--gpu", action="store_true", help="on the current GPU")
    arguments = parse(parser, argv, vocabulary=100, bptt=5, steps=1)
    if arguments.gpu and not torch.cuda.is_available():
        parser.error("argument --gpu: torch finds no CUDA GPU on this machine")
    torch.set_num_threads(1)
    keep_freed_memory()
    # All variants start from copies of one model.
    ninp, nhid, nlayers, dropouts = PRESETS[arguments.preset]
    torch.manual_seed(0)
    model = LSTMLanguageModel(
        arguments.vocabulary, ninp, nhid, nlayers, tie_weights=True, **dropouts
    )
    networks = {
        CLASSICAL: ClassicalModel(with_copies(copy.deepcopy(model))),
        "ours, copies of weights": with_copies(copy.deepcopy(model)),
        "ours": model,
    }
    device = torch.device("cuda" if arguments.gpu else "cpu")
    size = (arguments.bptt + 1, arguments.batch_size)
    words = torch.randint(arguments.vocabulary, size, device=device)
    steps = {}
    for name, network in networks.items():
        steps[name] = make_step(network.to(device), model, words, arguments.bf16)
    steps[PRODUCTS] = make_products(model, words, arguments.bf16)
    steps[BOUND] = make_bound(model, words, arguments.bf16)

    def block(step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(arguments.steps):
                step()
            if arguments.gpu:
                # Calls return before the device has done the work.
                torch.cuda.synchronize()

        return run

    case = f"preset {arguments.preset}, {arguments.vocabulary:,} words"
    if arguments.bf16:
        case += ", bfloat16"
    rows = measure(
        SUBJECT,
        case,
        {name: block(step) for name, step in steps.items()},
        arguments.blocks,
        amount=arguments.steps * arguments.batch_size * arguments.bptt,
    )
    conditions = (
        f"{arguments.blocks} blocks of {arguments.steps} steps of "
        f"{arguments.batch_size} x {arguments.bptt} words."
    )
    finish(SUBJECT, rows, arguments, conditions)


if __name__ == "__main__":
    main()

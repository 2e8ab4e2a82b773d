"""The reference that every layout is compared with: the model in one process and plain torch.

No engine, no DeepSpeed, no gradient accumulation: autograd over the full global batch at once,
`clip_grad_norm_` and an optimizer of torch.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import functools
import itertools
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils import clip_grad_norm_

from megatron_ds.config import Config, ModelConfig, OptimizerConfig
from megatron_ds.data.token_dataset import TokenDataset
from megatron_ds.model.attention.backends import AttentionOptions
from megatron_ds.model.attention.packed import FlexKernel, PackingOptions
from megatron_ds.model.experts.router import routers_with_bias, update_biases
from megatron_ds.model.experts.router_log import router_metrics
from megatron_ds.model.fp8_layers import compute_in_fp8
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams
from megatron_ds.train_state import StepPlan
from tests.dist.recorded import Recorded, Replay
from tests.unit.model.dense import computed_by, dense_flex

EOD = 7
"""Token that ends a document."""
ROUNDING = 6e-8
"""Relative error of a number that is rounded to fp32: 2^-24."""
Tensors = dict[str, torch.Tensor]
"""Full tensors in fp32 by canonical name."""


@dataclass
class Run:
    """The record of a training, step by step."""

    losses: list[float] = field(default_factory=list)
    """Mean over the global batch."""
    norms: list[float | None] = field(default_factory=list)
    """Global norm before clipping."""
    gradients: list[Tensors] = field(default_factory=list)
    """Before clipping, mean over the global batch. Empty for a step of which none are recorded."""
    weights: list[Tensors] = field(default_factory=list)
    """Before the first step and after each. Empty after a step of which none are recorded."""
    rates: list[float] = field(default_factory=list)
    """Learning rate of each optimizer step."""
    evaluations: list[float] = field(default_factory=list)
    """Evaluation loss after each step, with pipeline stages."""
    undecided: Tensors = field(default_factory=dict)
    """Elements of weights whose steps rounding decides, as booleans."""
    recorded: Recorded | None = None
    """What this rank decided."""
    largest_logits: list[float] = field(default_factory=list)
    """Of each step with QK-clip."""
    routing: list[dict[str, float]] = field(default_factory=list)
    """What the routers of a mixture of experts report of each step."""
    statistics: list[dict[str, float]] = field(default_factory=list)
    """Zeros and norms of layers that the engine reports of each step."""
    records: list[Mapping[str, Any]] = field(default_factory=list)
    """What --record-every keeps of each step."""
    times: list[dict[str, float]] = field(default_factory=list)
    """Milliseconds of the parts of each step."""
    regions: Counter[str] = field(default_factory=Counter)
    """How often each region of the engine was opened."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Further observations."""


class Samples(TokenDataset):
    """A dataset of samples of seq_length + 1 random tokens.

    Args:
        count: Number of samples.
        shape: Fields of the ModelConfig.
        different: Number of distinct samples, which are repeated. If None, all are distinct.
    """

    def __init__(self, count: int, shape: dict[str, Any], different: int | None = None) -> None:
        distinct = (different or count, shape["seq_length"] + 1)
        vocab = shape["vocab_size"]
        tokens = np.random.default_rng(11).integers(0, vocab, distinct, dtype=np.int64)
        self._tokens = np.resize(tokens, (count, distinct[1]))
        self.seq_length = shape["seq_length"]
        self.vocab_size = vocab
        self.cache = None

    def with_document_ends(self, fraction: float) -> Samples:
        """The same samples with EOD instead of a fraction of their tokens."""
        ended = copy.copy(self)
        ends = np.random.default_rng(13).random(self._tokens.shape) < fraction
        ended._tokens = np.where(ends, EOD, self._tokens)
        return ended

    def with_masked_half(self) -> Samples:
        """The same samples, of which every token of the second half is EOD."""
        masked = copy.copy(self)
        masked._tokens = self._tokens.copy()
        masked._tokens[:, self.seq_length // 2 :] = EOD
        return masked

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, position: int) -> npt.NDArray[np.int64]:
        sample: npt.NDArray[np.int64] = self._tokens[position]
        return sample

    def read_into(
        self, position: int, ids: npt.NDArray[np.int32], marks: npt.NDArray[np.uint8] | None = None
    ) -> None:
        ids[:] = self._tokens[position]

    def sample_id(self, position: int) -> str:
        return str(position)

    def batch(self, first: int, count: int) -> torch.Tensor:
        """Tokens [count, seq_length + 1] of consecutive samples."""
        assert first + count <= len(self)
        return torch.from_numpy(self._tokens[first : first + count])


def packing_of(config: Config) -> PackingOptions | None:
    """How boundaries of documents are treated."""
    data = config.data
    if not (data.reset_position_ids or data.reset_attention_mask):
        return None
    return PackingOptions(data.reset_position_ids, data.reset_attention_mask)


def dense_attention(config: Config) -> AttentionOptions:
    """Attention within documents by a dense mask."""
    kernel = FlexKernel(dense_flex) if config.data.reset_attention_mask else None
    attention = computed_by(kernel, config.model)
    return dataclasses.replace(attention, packing=packing_of(config))


def train_reference(
    config: Config,
    samples: Samples,
    plans: list[StepPlan],
    micro_batch_size: int | None = None,
    replay: Replay | None = None,
    *,
    moved: int | None = None,
) -> Run:
    """Trains the plans' steps in this process, in fp32.

    Args:
        config: The configuration, of which only the model, the data, the optimizer
            and fp8 matter.
        samples: The data.
        plans: The steps.
        micro_batch_size: Samples of a forward pass, which share a dropout mask; None: all of a
            step. With masked tokens only all of them give the mean over the step.
        replay: Decides instead of the model. None: the model decides.
        moved: Seed of a start that is moved by rounding. None: the start of the seed.
    """
    rng = RngStreams(0)
    model = _model_of(config, rng, moved)
    named = dict(model.named_parameters())
    optimizer = _optimizer(config.optimizer, config.model, named)
    logits = _LogitsOf(model) if config.optimizer.qk_clip else None
    run = Run(weights=[_copy(named)])
    consumed = 0
    with nullcontext() if replay is None else replay.deciding(model):
        for plan in plans:
            tokens = samples.batch(consumed, plan.global_batch_size)[:, : plan.seq_length + 1]
            model.zero_grad()
            losses = []
            parts = tokens.split(micro_batch_size or len(tokens))
            model.router_log.gradient_scale = 1.0 / len(parts)
            for part in parts:
                rng.begin_step(config.runtime.seed, consumed, 0)
                consumed += len(part)
                losses.append(_mean_loss(model, part, config))
            loss = torch.stack(losses).mean()
            loss.backward()
            reported = router_metrics(model.router_log.take())
            run.routing.append({name: float(value) for name, value in reported.items()})
            run.losses.append(loss.item())
            run.gradients.append(_copy({name: p.grad for name, p in named.items()}))
            limit = config.optimizer.clip_grad or float("inf")
            run.norms.append(clip_grad_norm_(model.parameters(), limit).item())
            for group in optimizer.param_groups:
                rate = plan.decoupled_lr if group.get("is_decoupled") else plan.lr
                group["lr"] = rate * group.get("lr_scale", 1.0)
            run.rates.append(plan.lr)
            if isinstance(optimizer, Lion):
                run.undecided = optimizer.undecided(named, run.undecided)
            optimizer.step()
            if isinstance(optimizer, CautiousAdamW):
                run.undecided = {
                    name: optimizer.undecided.get(p, torch.zeros_like(p, dtype=torch.bool))
                    for name, p in named.items()
                }
            if logits is not None:
                run.largest_logits.append(logits.clip(config.optimizer, named))
            update_biases(routers_with_bias(model), Mesh.single().dp, is_applied=True)
            run.weights.append(_copy(named))
    return run


def _model_of(config: Config, rng: RngStreams, moved: int | None) -> GPTModel:
    """The model at its start: each weight w, or w (1 + 6e-8 n) with a normal n for each element."""
    model = GPTModel(
        config.model,
        mesh=Mesh.single(),
        rng=rng,
        seed=config.runtime.seed,
        attention=dense_attention(config),
        moe=config.moe,
    )
    compute_in_fp8(model, config.precision)
    if moved is not None:
        generator = torch.Generator().manual_seed(moved)
        for p in model.parameters():
            noise = torch.randn(p.shape, dtype=torch.float64, generator=generator)
            p.data.copy_(p.double() * (1 + ROUNDING * noise))
    return model


@torch.no_grad()
def evaluate_reference(
    config: Config,
    samples: Samples,
    weights: Tensors,
    micro_batch_size: int | None = None,
    *,
    count: int,
) -> float:
    """The evaluation loss of the first samples. Arguments as for `train_reference`.

    Args:
        weights: Weights of the model.
        count: How many samples.
    """
    model = GPTModel(
        config.model,
        mesh=Mesh.single(),
        rng=RngStreams(0),
        seed=None,
        attention=dense_attention(config),
    ).eval()
    model.load_state_dict(weights)
    tokens = samples.batch(0, count)
    parts = tokens.split(micro_batch_size or len(tokens))
    return torch.stack([_mean_loss(model, part, config) for part in parts]).mean().item()


def _mean_loss(model: GPTModel, tokens: torch.Tensor, config: Config) -> torch.Tensor:
    inputs = tokens[:, :-1]
    mask = inputs != EOD if config.data.eod_mask_loss else None
    packing = packing_of(config)
    documents = None if packing is None else packing.documents(inputs == EOD)
    loss, extras = model(inputs, tokens[:, 1:], mask, documents=documents).weighted(None)
    model.router_log.add(extras)
    return loss  # type: ignore[no-any-return]


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2, tensor by tensor."""

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    def _interpolated(self, group: dict[str, Any], p: torch.Tensor) -> torch.Tensor:
        beta = group["betas"][0]
        return beta * self.state[p].get("m", torch.zeros_like(p)) + (1 - beta) * p.grad

    def undecided(self, named: dict[str, torch.nn.Parameter], before: Tensors) -> Tensors:
        """Elements whose sign is that of rounding errors, in the next step or `before`.

        The gradient of a key's bias is zero but for rounding, for softmax ignores it.
        """
        found = {
            p: self._interpolated(group, p) for group in self.param_groups for p in group["params"]
        }
        noise = 1e-6 * max(value.abs().max() for value in found.values())
        masks = {name: (found[p] != 0) & (found[p].abs() < noise) for name, p in named.items()}
        return {name: mask | before.get(name, mask) for name, mask in masks.items()}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr = group["lr"]
            decay = group["weight_decay"]
            _, beta2 = group["betas"]
            for p in group["params"]:
                update = torch.sign(self._interpolated(group, p))
                momentum = self.state[p].get("m", torch.zeros_like(p))
                self.state[p]["m"] = beta2 * momentum + (1 - beta2) * p.grad
                p -= lr * (update + decay * p)


class CautiousAdamW(torch.optim.AdamW):
    """AdamW, then the decay of Chen et al. 2025 where update and weight have the same sign."""

    def __init__(self, groups: Any, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self.undecided: dict[torch.Tensor, torch.Tensor] = {}

    def is_shrunk(self, p: torch.Tensor, before: torch.Tensor, update: torch.Tensor) -> Any:
        """Where the update moves a weight towards zero; where rounding decides it is noted."""
        assert p.grad is not None
        is_noise = (update.abs() < 1e-4 * update.abs().max()) & (p.grad != 0)
        self.undecided[p] = is_noise | self.undecided.get(p, is_noise)
        return update * before >= 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        before = {p: p.clone() for group in self.param_groups for p in group["params"]}
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            group["weight_decay"] = 0.0
        super().step()
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay
            for p in group["params"]:
                is_shrunk = self.is_shrunk(p, before[p], before[p] - p)
                p -= group["lr"] * decay * before[p] * is_shrunk


class Muon(CautiousAdamW):
    """Jordan et al. 2024 for the matrices, AdamW for the other groups.

    Args:
        groups: The others.
        matrices: Weights, each with the sizes of the matrices of which its rows consist.
        options: Settings.
    """

    def __init__(
        self,
        groups: Any,
        matrices: list[tuple[torch.nn.Parameter, tuple[int, ...]]],
        options: OptimizerConfig,
    ) -> None:
        betas = options.adam_beta1, options.adam_beta2
        super().__init__(groups, lr=options.lr, betas=betas, eps=options.adam_eps)
        self.matrices = matrices
        self.options = options
        self.momenta = [torch.zeros_like(p) for p, _ in matrices]
        self.rates: dict[torch.Tensor, tuple[float, float]] = {}
        """Factor of the learning rate, and weight decay, of matrices with their own."""
        self.seconds: dict[tuple[int, int], torch.Tensor] = {}
        self.epsilon = options.adam_eps
        """Epsilon of matrices."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (super() if self.options.cautious_weight_decay else super(CautiousAdamW, self)).step()
        rate = self.param_groups[0]["lr"]
        beta = self.options.muon_momentum
        for index, ((p, sizes), momentum) in enumerate(
            zip(self.matrices, self.momenta, strict=True)
        ):
            assert p.grad is not None
            factor, decay = self.rates.get(p, (1.0, self.options.weight_decay))
            momentum.mul_(beta).add_(p.grad)
            update = self._input(p.grad, momentum)
            experts = update if p.dim() == 3 else [update]
            parts = [part for expert in experts for part in expert.split(sizes)]
            steps = [self._step_of(part, (index, n)) for n, part in enumerate(parts)]
            if steps[0] is None:
                continue
            step = torch.cat(steps).view_as(p)
            is_cautious = self.options.cautious_weight_decay
            decayed = p * self.is_shrunk(p, p, step) if is_cautious else p
            p -= rate * factor * (step + decay * decayed)

    def _input(self, gradient: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return gradient + self.options.muon_momentum * momentum

    def _step_of(self, matrix: torch.Tensor, key: tuple[int, int]) -> Any:
        """Five Newton-Schulz iterations, scaled to the RMS of AdamW's steps (Liu et al. 2025).

        NorMuon is algorithm 1 of Li et al. 2025, Polar Express algorithm 1 of Amsel et al. 2025.
        """
        is_polar = self.options.muon_coefficient_type == "polar_express"
        x = matrix / matrix.norm() / (1.01 if is_polar else 1)
        for a, b, c in POLAR_EXPRESS if is_polar else [(3.4445, -4.7750, 2.0315)] * 5:
            gram = x @ x.T
            x = a * x + b * gram @ x + c * gram @ gram @ x
        if not self.options.normuon:
            return 0.2 * max(matrix.shape) ** 0.5 * x
        beta = self.options.normuon_beta2
        mean = x.square().mean(dim=1)
        self.seconds[key] = beta * self.seconds.get(key, 0 * mean) + (1 - beta) * mean
        x = x / (self.seconds[key].sqrt() + 1e-8)[:, None]
        return 0.2 * matrix.numel() ** 0.5 * x / x.norm()


class Soap(Muon):
    """Algorithm 3 of Vyas et al. 2024 with the eigenbasis of the smaller side alone, and their
    public code's first step, order of eigenvectors and corrections of the bias."""

    def _input(self, gradient: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
        return gradient

    def _step_of(self, matrix: torch.Tensor, key: tuple[int, int]) -> Any:
        if len(matrix) > matrix.shape[1]:
            step = self._step_of(matrix.T, key)
            return None if step is None else step.T
        options = self.options
        state = self.state.setdefault(key, {})
        beta1 = options.adam_beta1
        beta2 = options.adam_beta2
        beta = options.soap_shampoo_beta
        outer = (1 - beta) * matrix @ matrix.T
        if not state:
            vectors = torch.linalg.eigh(outer)[1].flip(1)
            state |= {"L": outer, "Q": vectors, "M": 0 * matrix, "V": 0 * matrix, "t": 0}
            return None
        state["t"] += 1
        state["M"] = beta1 * state["M"] + (1 - beta1) * matrix
        state["V"] = beta2 * state["V"] + (1 - beta2) * (state["Q"].T @ matrix) ** 2
        rotated = state["Q"].T @ state["M"] / (1 - beta1 ** state["t"])
        root = (state["V"] / (1 - beta2 ** state["t"])).sqrt()
        step = state["Q"] @ (rotated / (root + self.epsilon))
        state["L"] = beta * state["L"] + outer
        if state["t"] % options.soap_precondition_frequency == 0:
            values = (state["Q"].T @ state["L"] @ state["Q"]).diag()
            order = self._order_of(values.tolist())
            state["V"] = state["V"][order]
            state["Q"] = torch.linalg.qr(state["L"] @ state["Q"][:, order])[0]
        return step

    def _order_of(self, values: list[float]) -> list[int]:
        """Descending, but for runs of values that are within 1e-6 of the one before."""
        order = sorted(range(len(values)), key=lambda index: -values[index])
        groups = [[order[0]]]
        for before, index in itertools.pairwise(order):
            if values[before] - values[index] > 1e-6 * abs(values[before]):
                groups.append([])
            groups[-1].append(index)
        return [index for group in groups for index in sorted(group)]


OF_MATRICES = {"muon": Muon, "soap": Soap}
"""Optimizers of matrices, by the value of --optimizer."""
POLAR_EXPRESS = [
    (8.205160414, -22.90193498, 16.46072465),
    (4.066395160, -2.861154054, 0.5183995232),
    (3.909595924, -2.823351735, 0.5250370220),
    (3.285564018, -2.415301960, 0.4852940659),
    (2.277873286, -1.619821717, 0.3984813140),
]
"""With the safety factor of 1.01, to which only rounding is added."""


def _fused_rows(config: ModelConfig, name: str, weight: torch.Tensor) -> tuple[int, ...]:
    """Rows of the matrices of which a layer's weight consists."""
    heads = config.num_attention_heads * config.head_dim
    kv = config.kv_heads * config.head_dim
    if name.endswith("attention.qkv.weight"):
        gates = len(weight) - heads - 2 * kv
        return (heads, kv, kv, gates) if gates else (heads, kv, kv)
    rows = weight.shape[-2]
    is_fused = name.endswith("fc_in.weight") and config.activation == "swiglu"
    return (rows // 2,) * 2 if is_fused else (rows,)


def _optimizer(
    options: OptimizerConfig, config: ModelConfig, named: dict[str, torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Weight decay applies to matrices, not to biases and norms."""
    # The biases of experts are stacked.
    matrix_names = sorted(n for n, p in named.items() if p.dim() > 1 and not n.endswith(".bias"))
    matrices = []
    if options.spec.matrices is not None:
        hidden = [name for name in matrix_names if name.startswith(("layers.", "predictions."))]
        hidden_weights = {name: named[name] for name in hidden}
        matrices = [(p, _fused_rows(config, name, p)) for name, p in hidden_weights.items()]
        named = {name: p for name, p in named.items() if name not in hidden}
    special = []
    if options.decoupled_lr is not None:
        for name in ("embedding.word.weight", "embedding.position.weight", "head.weight"):
            if name in named:
                is_embedding = name.startswith("embedding.")
                decay = options.embedding_weight_decay if is_embedding else options.weight_decay
                is_decoupled = name != "embedding.position.weight"
                group = {"params": [named[name]], "weight_decay": decay}
                special.append(group | {"is_decoupled": is_decoupled})
        named = {n: p for n, p in named.items() if all(p is not g["params"][0] for g in special)}
    decaying = [named[name] for name in matrix_names if name in named]
    others = [named[name] for name in sorted(named.keys() - {*matrix_names})]
    groups = [
        {"params": decaying, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
        *special,
    ]
    names = {p: name for name, p in named.items()} | {
        group["params"][0]: "embedding or head" for group in special
    }
    groups += [
        {**group, "params": [group["params"].pop(index)], "lr_scale": scale, "weight_decay": decay}
        for pattern, scale, decay in _named_rates(options)
        for group in groups
        for index in reversed(range(len(group["params"])))
        if re.fullmatch(pattern, names.get(group["params"][index], ""))
    ]
    if config.use_mup:
        groups = [part for group in groups for part in _with_mup(group, names, config, options)]
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.lr, momentum=options.sgd_momentum)
    if options.optimizer == "lion":
        return Lion(groups, lr=options.lr, betas=(options.lion_beta1, options.lion_beta2))
    if options.spec.matrices is not None:
        muon = OF_MATRICES[options.optimizer](groups, matrices, options)
        if config.use_mup and options.optimizer == "soap":
            ratio = config.mup_base_hidden_size / config.hidden_size
            decay = options.weight_decay / (ratio if config.mup_independent_weight_decay else 1.0)
            muon.rates |= {p: (ratio, decay) for p, _ in matrices}
            if config.mup_base_num_layers:
                muon.epsilon *= ratio * config.mup_base_num_layers / config.num_layers
        scaled = dict(muon.rates)
        for name, scale, decay in reversed(_named_rates(options)):
            hits = [p for key, p in hidden_weights.items() if re.fullmatch(name, key)]
            muon.rates |= {p: (scale * scaled.get(p, (1.0,))[0], decay) for p in hits}
        return muon
    adam = CautiousAdamW if options.cautious_weight_decay else torch.optim.AdamW
    return adam(
        groups, lr=options.lr, betas=(options.adam_beta1, options.adam_beta2), eps=options.adam_eps
    )


def _with_mup(
    group: dict[str, Any],
    names: dict[torch.Tensor, str],
    config: ModelConfig,
    options: OptimizerConfig,
) -> list[dict[str, Any]]:
    """A group for each parameter, with the rates of Megatron-LM's `get_mup_config_overrides` and,
    over depths, of CompleteP (Dey et al. 2025, table 1)."""
    width = config.hidden_size / config.mup_base_hidden_size
    depth = config.num_layers / (config.mup_base_num_layers or config.num_layers)
    parts = []
    for p in group["params"]:
        name = names[p]
        is_hidden = name.startswith(("layers.", "predictions.")) and p.dim() > 1
        is_hidden &= not name.endswith(".bias")
        part = {**group, "params": [p]}
        if options.optimizer == "sgd":
            rate = 1.0 if is_hidden or group.get("is_decoupled") else width
        else:
            rate = 1 / width if is_hidden else 1.0
        if options.optimizer == "adam" and is_hidden:
            part["eps"] = options.adam_eps / width
        if config.mup_base_num_layers and options.optimizer in ("adam", "muon", "soap"):
            is_outside = name.startswith(("embedding", "head"))
            part["eps"] = options.adam_eps / (width if is_outside else width * depth)
        part["lr_scale"] = group.get("lr_scale", 1.0) * rate
        if config.mup_independent_weight_decay:
            part["weight_decay"] = group["weight_decay"] / rate
        parts.append(part)
    return parts


def _named_rates(options: OptimizerConfig) -> list[tuple[str, float, float]]:
    """Patterns of names, factors of the learning rate and weight decays of --param-group."""
    form = re.compile("pattern=(.*),lr=(.*)x,wd=(.*)")
    values = [form.fullmatch(text).groups() for text in options.param_group or ()]  # type: ignore[union-attr]
    return [(fnmatch.translate(name), float(lr), float(decay)) for name, lr, decay in values]


class _LogitsOf:
    """Kimi K2 (2025), algorithm 1: all logits of a layer, and what follows for its weights.

    Args:
        model: The model, whose cores are called through this.
    """

    def __init__(self, model: GPTModel) -> None:
        self.largest: dict[int, torch.Tensor] = {}
        self.model = model
        for block in model.blocks():
            attend = block.attention.attend
            block.attention.attend = functools.partial(self._attend, block, attend)

    def _attend(self, block: Any, attend: Any, *arguments: Any) -> Any:
        *inputs, core = arguments
        return attend(*inputs, _Observed(core, functools.partial(self._record, block)))

    @torch.no_grad()
    def _record(self, block: Any, q: torch.Tensor, k: torch.Tensor) -> None:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        logits = torch.einsum("bnsd,bntd->nbst", q, k) * (block.rule.scale or q.shape[-1] ** -0.5)
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        if block.rule.window is not None:
            seen = seen.triu(1 - block.rule.window)
        largest = logits[:, :, seen].flatten(1).amax(1)
        self.largest[block.layer] = largest.maximum(self.largest.get(block.layer, largest))

    @torch.no_grad()
    def clip(self, options: OptimizerConfig, named: dict[str, torch.nn.Parameter]) -> float:
        overall = max(float(value.max()) for value in self.largest.values())
        for layer, largest in self.largest.items():
            prefix = f"layers.{layer}.attention"
            config = self.model.config
            heads = len(largest)
            groups = heads if config.multi_latent_attention else config.kv_heads
            for group, values in enumerate(largest.view(groups, -1)):
                factor = min(1.0, options.qk_clip_threshold / float(values.max()))
                of_q = factor**options.qk_clip_alpha
                of_k = factor ** (1 - options.qk_clip_alpha)
                if config.multi_latent_attention:
                    plain = config.qk_head_dim
                    rotated = config.qk_pos_emb_head_dim
                    q = named[f"{prefix}.q_up.weight"].unflatten(0, (heads, plain + rotated))
                    q[group, :plain] *= of_q
                    q[group, plain:] *= factor
                    kv = named[f"{prefix}.kv_up.weight"].unflatten(0, (heads, -1))
                    kv[group, :plain] *= of_k
                    continue
                size = config.head_dim
                shared = heads // groups
                for name in (f"{prefix}.qkv.weight", f"{prefix}.qkv.bias"):
                    if name in named:
                        start = group * shared * size
                        named[name][start : start + shared * size] *= of_q
                        start = (heads + group) * size
                        named[name][start : start + size] *= of_k
        self.largest.clear()
        return overall


@dataclass
class _Observed:
    core: Any
    record: Any

    def attend(self, q: torch.Tensor, k: torch.Tensor, *arguments: Any) -> Any:
        self.record(q, k)
        return self.core.attend(q, k, *arguments)


def _copy(tensors: dict[str, Any]) -> Tensors:
    return {name: value.detach().clone() for name, value in tensors.items()}

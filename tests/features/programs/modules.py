"""Modules of torch.nn on the worker: input, parameters, buffers."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.features.table import add
from tests.features.world import call, data, leaf, module


class First(nn.Module):
    """The first of what a module returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class WithTarget(nn.Module):
    def __init__(self, loss: nn.Module, target: Tensor) -> None:
        super().__init__()
        self.loss = loss
        self.register_buffer("target", target)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(x.log_softmax(-1), self.target)


class Ctc(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([5]), torch.tensor([2])
        return nn.functional.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2]]), *lengths)


class Chain(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({"left": nn.Linear(3, 2), "right": nn.Linear(3, 2)})

    def forward(self, x: Tensor) -> Tensor:
        return self.branches["left"](x) * self.branches["right"](x).sin()


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(3), torch.ones(3)])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights[0] + self.weights[1] ** 2


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.double()).float()


def half_frozen() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    made[0].requires_grad_(False)
    return made


# name: how it is made, and the shapes of its inputs
MODULES: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "linear": (partial(nn.Linear, 3, 4), ((2, 3),)),
    "linear_without_bias": (partial(nn.Linear, 3, 4, bias=False), ((2, 3),)),
    "bilinear": (partial(nn.Bilinear, 3, 4, 2), ((2, 3), (2, 4))),
    "identity": (nn.Identity, ((2, 3),)),
    "conv1d": (partial(nn.Conv1d, 2, 3, 2), ((1, 2, 5),)),
    "conv2d": (partial(nn.Conv2d, 2, 3, 2, stride=2, padding=1), ((1, 2, 4, 4),)),
    "conv2d_grouped": (partial(nn.Conv2d, 2, 4, 2, groups=2), ((1, 2, 4, 4),)),
    "conv2d_dilated": (partial(nn.Conv2d, 1, 2, 2, dilation=2), ((1, 1, 4, 4),)),
    "conv2d_circular": (partial(nn.Conv2d, 1, 2, 3, padding=1, padding_mode="circular"), ((1, 1, 4, 4),)),
    "conv3d": (partial(nn.Conv3d, 1, 2, 2), ((1, 1, 3, 3, 3),)),
    "conv_transpose1d": (partial(nn.ConvTranspose1d, 2, 3, 2), ((1, 2, 4),)),
    "conv_transpose2d": (partial(nn.ConvTranspose2d, 2, 3, 2, stride=2), ((1, 2, 3, 3),)),
    "unfold": (partial(nn.Unfold, 2), ((1, 2, 4, 4),)),
    "fold": (partial(nn.Fold, (3, 3), 2), ((1, 4, 4),)),
    "max_pool1d": (partial(nn.MaxPool1d, 2), ((1, 2, 6),)),
    "max_pool2d": (partial(nn.MaxPool2d, 2), ((1, 2, 4, 4),)),
    "avg_pool2d": (partial(nn.AvgPool2d, 2), ((1, 2, 4, 4),)),
    "lp_pool2d": (partial(nn.LPPool2d, 2, 2), ((1, 1, 4, 4),)),
    "adaptive_avg_pool2d": (partial(nn.AdaptiveAvgPool2d, 2), ((1, 2, 5, 5),)),
    "adaptive_max_pool1d": (partial(nn.AdaptiveMaxPool1d, 2), ((1, 2, 5),)),
    "fractional_max_pool2d": (
        partial(nn.FractionalMaxPool2d, 2, output_size=2, _random_samples=torch.full((1, 1, 2), 0.5)),
        ((1, 1, 4, 4),),
    ),
    "relu": (nn.ReLU, ((2, 3),)),
    "relu_in_place": (lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), ((2, 3),)),
    "relu6": (nn.ReLU6, ((2, 3),)),
    "leaky_relu": (nn.LeakyReLU, ((2, 3),)),
    "prelu": (partial(nn.PReLU, 3), ((2, 3),)),
    "elu": (nn.ELU, ((2, 3),)),
    "selu": (nn.SELU, ((2, 3),)),
    "celu": (nn.CELU, ((2, 3),)),
    "gelu": (nn.GELU, ((2, 3),)),
    "silu": (nn.SiLU, ((2, 3),)),
    "mish": (nn.Mish, ((2, 3),)),
    "softplus": (nn.Softplus, ((2, 3),)),
    "softsign": (nn.Softsign, ((2, 3),)),
    "softshrink": (nn.Softshrink, ((2, 3),)),
    "hardswish": (nn.Hardswish, ((2, 3),)),
    "hardtanh": (nn.Hardtanh, ((2, 3),)),
    "tanh": (nn.Tanh, ((2, 3),)),
    "tanhshrink": (nn.Tanhshrink, ((2, 3),)),
    "sigmoid": (nn.Sigmoid, ((2, 3),)),
    "logsigmoid": (nn.LogSigmoid, ((2, 3),)),
    "glu": (nn.GLU, ((2, 4),)),
    "softmax": (partial(nn.Softmax, -1), ((2, 3),)),
    "softmin": (partial(nn.Softmin, -1), ((2, 3),)),
    "log_softmax": (partial(nn.LogSoftmax, -1), ((2, 3),)),
    "threshold": (partial(nn.Threshold, 0.1, 2.0), ((2, 3),)),
    "batch_norm1d": (partial(nn.BatchNorm1d, 3), ((4, 3),)),
    "batch_norm2d": (partial(nn.BatchNorm2d, 2), ((2, 2, 3, 3),)),
    "batch_norm_without_statistics": (partial(nn.BatchNorm1d, 3, track_running_stats=False), ((4, 3),)),
    "batch_norm_cumulative": (partial(nn.BatchNorm1d, 3, momentum=None), ((4, 3),)),
    "batch_norm_evaluated": (lambda: nn.BatchNorm1d(3).eval(), ((4, 3),)),
    "layer_norm": (partial(nn.LayerNorm, 3), ((2, 3),)),
    "rms_norm": (partial(nn.RMSNorm, 3), ((2, 3),)),
    "group_norm": (partial(nn.GroupNorm, 2, 4), ((2, 4, 3),)),
    "instance_norm": (partial(nn.InstanceNorm1d, 2, affine=True, track_running_stats=True), ((2, 2, 5),)),
    "local_response_norm": (partial(nn.LocalResponseNorm, 2), ((1, 4, 3),)),
    "lazy_linear": (partial(nn.LazyLinear, 3), ((2, 3),)),
    "rnn": (lambda: First(nn.RNN(3, 4)), ((5, 2, 3),)),
    "lstm": (lambda: First(nn.LSTM(3, 4)), ((5, 2, 3),)),
    "lstm_deep": (lambda: First(nn.LSTM(3, 4, num_layers=2, bidirectional=True)), ((5, 2, 3),)),
    "lstm_projected": (lambda: First(nn.LSTM(3, 4, proj_size=2)), ((5, 2, 3),)),
    "gru": (lambda: First(nn.GRU(3, 4, batch_first=True)), ((2, 5, 3),)),
    "rnn_cell": (partial(nn.RNNCell, 3, 4), ((2, 3),)),
    "gru_cell": (partial(nn.GRUCell, 3, 4), ((2, 3),)),
    "lstm_cell": (lambda: First(nn.LSTMCell(3, 4)), ((2, 3),)),
    "multihead_attention": (SelfAttention, ((3, 2, 4),)),
    "transformer_encoder_layer": (partial(nn.TransformerEncoderLayer, 4, 2, 8, dropout=0.0), ((3, 2, 4),)),
    "transformer_decoder_layer": (partial(nn.TransformerDecoderLayer, 4, 2, 8, dropout=0.0), ((3, 2, 4), (2, 2, 4))),
    "transformer": (
        partial(nn.Transformer, 4, 2, 1, 1, 8, dropout=0.0),
        ((3, 2, 4), (2, 2, 4)),
    ),
    "cosine_similarity": (nn.CosineSimilarity, ((2, 3), (2, 3))),
    "pairwise_distance": (nn.PairwiseDistance, ((2, 3), (2, 3))),
    "pixel_shuffle": (partial(nn.PixelShuffle, 2), ((1, 4, 2, 2),)),
    "channel_shuffle": (partial(nn.ChannelShuffle, 2), ((1, 4, 2, 2),)),
    "upsample": (partial(nn.Upsample, scale_factor=2, mode="bilinear", align_corners=False), ((1, 1, 3, 3),)),
    "upsample_nearest": (partial(nn.Upsample, scale_factor=2), ((1, 1, 3, 3),)),
    "zero_pad": (partial(nn.ZeroPad2d, 1), ((1, 1, 3, 3),)),
    "reflection_pad": (partial(nn.ReflectionPad2d, 1), ((1, 1, 3, 3),)),
    "replication_pad": (partial(nn.ReplicationPad2d, 1), ((1, 1, 3, 3),)),
    "flatten": (nn.Flatten, ((2, 3, 2),)),
    "unflatten": (partial(nn.Unflatten, 1, (3, 2)), ((2, 6),)),
    "mse_loss": (nn.MSELoss, ((2, 3), (2, 3))),
    "l1_loss": (nn.L1Loss, ((2, 3), (2, 3))),
    "smooth_l1_loss": (nn.SmoothL1Loss, ((2, 3), (2, 3))),
    "huber_loss": (nn.HuberLoss, ((2, 3), (2, 3))),
    "bce_with_logits_loss": (lambda: WithTarget(nn.BCEWithLogitsLoss(), (data(2, 3) > 0).float()), ((2, 3),)),
    "cross_entropy_loss": (
        lambda: WithTarget(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])), torch.tensor([0, 2])),
        ((2, 3),),
    ),
    "nll_loss": (lambda: WithTarget(nn.NLLLoss(), torch.tensor([0, 2])), ((2, 3),)),
    "kl_div_loss": (lambda: WithTarget(nn.KLDivLoss(reduction="batchmean"), data(2, 3).softmax(-1)), ((2, 3),)),
    "poisson_nll_loss": (lambda: WithTarget(nn.PoissonNLLLoss(), data(2, 3).abs()), ((2, 3),)),
    "hinge_embedding_loss": (lambda: WithTarget(nn.HingeEmbeddingLoss(), data(2, 3).sign()), ((2, 3),)),
    "multi_margin_loss": (lambda: WithTarget(nn.MultiMarginLoss(), torch.tensor([0, 2])), ((2, 3),)),
    "triplet_margin_loss": (nn.TripletMarginLoss, ((2, 3), (2, 3), (2, 3))),
    "ctc_loss": (Ctc, ((5, 1, 4),)),
    "module_list": (lambda: Chain(nn.ModuleList([nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)])), ((2, 3),)),
    "module_dict": (Branches, ((2, 3),)),
    "parameter_list": (Weights, ((2, 3),)),
    "tied_twice": (Twice, ((2, 3),)),
    "frozen_half": (half_frozen, ((2, 3),)),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), ((2, 3),)),
    "spectral_norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), ((2, 3),)),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)), ((2, 3),)),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(3, 4), "weight", 0.5), ((2, 3),)),
    "double": (Doubled, ((2, 3),)),
}


def run_there(name: str, *inputs: Tensor) -> Tensor:
    return module(name, MODULES[name][0])(*inputs)


def program_of(name: str) -> Any:
    inputs = [leaf(*shape) for shape in MODULES[name][1]]
    return call(run_there, name, *inputs) * 2


for _name in MODULES:
    if _name != "lazy_linear":
        add(f"module_{_name}", partial(program_of, _name))


def lazily(x: Tensor) -> Tensor:
    """A lazy module gets its parameters in the first call, so the program gives them its numbers afterwards."""
    made = module("lazy", partial(nn.LazyLinear, 3))
    made(x)
    with torch.no_grad():
        for each in made.parameters():
            each.fill_(0.5)
    return made(x)


add("module_lazy_linear", lambda: call(lazily, leaf(2, 3)))


def embedded(words: Tensor, sparse: bool) -> Tensor:
    return module("words", partial(nn.Embedding, 5, 3, sparse=sparse))(words) ** 2


add("module_embedding", lambda: call(embedded, torch.tensor([0, 3, 3]), False))
add("module_embedding_sparse", lambda: call(embedded, torch.tensor([0, 3, 3]), True))
add(
    "module_embedding_sparse_twice",
    lambda: call(embedded, torch.tensor([0, 3]), True) * call(embedded, torch.tensor([3, 1]), True),
)


def bag(words: Tensor, mode: str) -> Tensor:
    return module("bag", partial(nn.EmbeddingBag, 5, 3, mode=mode))(words, torch.tensor([0, 2])) ** 2


for _mode in ("sum", "mean", "max"):
    add(f"module_embedding_bag_{_mode}", partial(call, bag, torch.tensor([0, 3, 1, 3]), _mode))

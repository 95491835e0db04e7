"""What both programs need: how they meet, and what protects what they send. Neither knows the other's code or data."""

import argparse
import logging
from pathlib import Path

import torch
from torch import Tensor

from telegrad import rpc

WIDTH = 16


def arguments(who: str) -> argparse.Namespace:
    """The command line of a party."""
    parser = argparse.ArgumentParser(description=f"The {who}'s part of split learning.")
    parser.add_argument("--meet", required=True, help="tcp://HOST:PORT, an address of the hospital")
    parser.add_argument("--host", required=True, help="the address of this party that the other can reach")
    parser.add_argument("--keys", type=Path, required=True, help="folder with its certificate, key and the authority's")
    parser.add_argument("--audit", type=Path, required=True, help="file for the record of all that leaves and comes")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--clip", type=float, default=0.0, help="largest norm of a row that is sent; 0 for no limit")
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of noise on activations")
    parser.add_argument("--gradient-noise", type=float, default=0.0, help="the same on gradients, which are smaller")
    parser.add_argument("--output", type=Path, default=Path("examples-output"), help="folder of the plot")
    return parser.parse_args()


def join(who: str, rank: int, given: argparse.Namespace) -> None:
    """Become one of the two parties: TLS with certificates, exported functions alone, limits, an audit."""
    logging.basicConfig(level=logging.WARNING)
    keys = given.keys
    options = rpc.RpcBackendOptions(
        init_method=given.meet,
        host=given.host,
        transports=("tcp",),
        secret_file=str(keys / "job-secret"),
        tls=rpc.Tls(str(keys / f"{who}.pem"), str(keys / f"{who}.key"), str(keys / "authority.pem")),
        exports_only=True,
        limits=rpc.Limits(calls_per_second=500, running=4, references=0, contexts=4),
        max_message_bytes=2**20,
        audit=given.audit,
    )
    rpc.init_rpc(who, rank=rank, world_size=2, rpc_backend_options=options)


class Protect(torch.autograd.Function):
    """Clips and adds noise to what leaves in the forward pass, and to the gradients that leave in the backward pass."""

    @staticmethod
    def forward(ctx: object, sent: Tensor, clip: float, noise: float, on_backward: bool) -> Tensor:
        """What is sent instead."""
        ctx.settings = (clip, noise, on_backward)  # type: ignore[attr-defined] # torch's way to keep something
        return sent.clone() if on_backward else blur(sent, clip, noise)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """What is returned instead."""
        clip, noise, on_backward = ctx.settings  # type: ignore[attr-defined] # kept in forward
        (gradient,) = gradients
        return blur(gradient, clip, noise) if on_backward else gradient, None, None, None


def blur(values: Tensor, clip: float, noise: float) -> Tensor:
    """Rows of at most the norm `clip`, with Gaussian noise of the standard deviation `noise`."""
    if clip:
        norms = values.norm(dim=1, keepdim=True).clamp(min=1e-12)
        values = values * (clip / norms).clamp(max=1.0)
    return values + noise * torch.randn_like(values) if noise else values

"""The blocks that are chosen in models as people write them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from drumline.parallel.blocks import describe_blocks, find_blocks

WIDTH = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = mlp()


class NanoGPT(nn.Module):
    """As nanoGPT, with the perceptron as a Sequential: there are more Linears in lists than
    blocks."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(50, WIDTH), "h": nn.ModuleList(Block() for _ in range(12))}
        self.transformer = nn.ModuleDict({**parts, "ln_f": nn.LayerNorm(WIDTH)})
        self.lm_head = nn.Linear(WIDTH, 50, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
    )
    return transformers.BertForMaskedLM(config)


class ViT(nn.Module):
    """As timm writes it: blocks in a Sequential, patches by a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4), nn.Flatten(2))
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))


class PairsViT(nn.Module):
    """As in vit-pytorch: a layer is a list of two modules, and has no class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Attention(), FeedForward()]) for _ in range(5))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = nn.Sequential(
            nn.Conv2d(channels_in, channels, 1), nn.BatchNorm2d(channels)
        )


def stage(channels_in: int, channels: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(channels_in, channels), BasicBlock(channels, channels))


class ResNet(nn.Module):
    """As torchvision writes it: stages are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 7)
        self.layer1 = stage(4, 4)
        self.layer2 = stage(4, 8)
        self.layer3 = stage(8, 16)
        self.fc = nn.Linear(16, 10)


class Stage(nn.Module):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [BasicBlock(channels_in, channels), BasicBlock(channels, channels)]
        )
        self.norm = nn.BatchNorm2d(channels)


class StagedNet(nn.Module):
    """As Swin and ConvNeXt: a list of stages, each with a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(4, 8), Stage(8, 16), Stage(16, 32)])


class DoubleConv(nn.Module):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )


class Up(nn.Module):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels_in, channels, 2, 2)
        self.conv = DoubleConv(channels_in, channels)


class UNet(nn.Module):
    """As in Pytorch-UNet: downwards a Sequential with the block in it, upwards attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inc = DoubleConv(3, 4)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(4, 8))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(8, 16))
        self.up1 = Up(16, 8)
        self.up2 = Up(8, 4)
        self.outc = nn.Conv2d(4, 2, 1)


def encoder_decoder() -> nn.Module:
    return nn.Transformer(
        WIDTH, 2, num_encoder_layers=3, num_decoder_layers=4, dim_feedforward=16, batch_first=True
    )


class MixtureBlock(nn.Module):
    """The experts hold almost all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.gate = nn.Linear(WIDTH, 8)
        self.experts = nn.ModuleList(FeedForward() for _ in range(8))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(MixtureBlock() for _ in range(4))


def one_block() -> nn.Module:
    """One block in a Sequential: nothing repeats but its layers."""
    return nn.Sequential(nn.Embedding(50, WIDTH), Block(), nn.Linear(WIDTH, 50))


def plain_blocks() -> nn.Module:
    """Blocks that have no class of their own."""
    return nn.Sequential(nn.Linear(4, WIDTH), *(mlp() for _ in range(5)), nn.Linear(WIDTH, 2))


class NoList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block1 = Block()
        self.block2 = Block()
        self.block3 = Block()
        self.head = nn.Linear(WIDTH, 2)


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)


class OwnParameters(nn.Module):
    """A block without modules in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Tensor(4, 4))


def own_parameters() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), OwnParameters(), OwnParameters(), OwnParameters())


@pytest.mark.parametrize(
    ("build", "blocks"),
    [
        (NanoGPT, "12 x Block"),
        pytest.param(llama, "3 x LlamaDecoderLayer", marks=pytest.mark.soak),
        pytest.param(bert, "4 x BertLayer", marks=pytest.mark.soak),
        (ViT, "6 x Block"),
        (PairsViT, "5 x Attention and 5 x FeedForward"),
        (ResNet, "6 x BasicBlock"),
        (StagedNet, "6 x BasicBlock"),
        (UNet, "5 x DoubleConv"),
        (encoder_decoder, "4 x TransformerDecoderLayer and 3 x TransformerEncoderLayer"),
        (Mixture, "4 x MixtureBlock"),
        (one_block, "1 x Block"),
        (plain_blocks, "5 x Sequential"),
        (NoList, "3 x Block"),
        (Flat, "none"),
        (own_parameters, "3 x OwnParameters"),
    ],
)
def test_blocks_are_what_repeats_and_holds_most_parameters(
    build: Callable[[], nn.Module], blocks: str
) -> None:
    assert describe_blocks(find_blocks(build()).values()) == blocks


def test_tied_weights_do_not_make_the_embedding_a_block() -> None:
    assert set(find_blocks(NanoGPT())) == {f"transformer.h.{number}" for number in range(12)}

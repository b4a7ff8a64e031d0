from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from apo_experiments.data.augment import PADDING, Normalization, crop_and_flip
from apo_experiments.data.streams import EpochBatches, ImageBatches, TableBatches, TextBatches

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randint(0, 256, (23, 3, 12, 12), generator=GENERATOR, dtype=torch.uint8)
LABELS = torch.arange(23)
PAIRS = [([4 + i % 5] * (1 + i % 7), [9 + i % 3] * (1 + i % 4) + [20 + i]) for i in range(40)]


def plain_images(seed: int = 3) -> ImageBatches:
    return ImageBatches(IMAGES, LABELS, 5, seed)


def augmented_images(seed: int = 3) -> ImageBatches:
    return ImageBatches(IMAGES, LABELS, 5, seed, normalize=Normalization((0.5,) * 3, (0.2,) * 3), augment=True)


def rows_of_a_table(seed: int = 3) -> TableBatches:
    return TableBatches(IMAGES.float().flatten(1), LABELS[:, None].float(), 5, seed)


def sentences(seed: int = 3) -> TextBatches:
    return TextBatches(PAIRS, 30, seed)


STREAMS = [plain_images, augmented_images, rows_of_a_table, sentences]
Make = Callable[..., EpochBatches]


def flat(batch: tuple[Any, Any]) -> list[torch.Tensor]:
    inputs, target = batch
    return [*inputs, target] if isinstance(inputs, tuple) else [inputs, target]


def take(stream: EpochBatches, count: int) -> list[list[torch.Tensor]]:
    return [flat(stream.next()) for _ in range(count)]


def equal(first: list[list[torch.Tensor]], second: list[list[torch.Tensor]]) -> bool:
    return all(
        len(a) == len(b) and all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("make", STREAMS)
def test_the_seed_decides_the_stream(make: Make) -> None:
    steps = 3 * make().steps_per_epoch
    assert equal(take(make(), steps), take(make(), steps))
    assert not equal(take(make(seed=3), steps), take(make(seed=4), steps))
    torch.manual_seed(99)
    first = take(make(), 2)
    torch.randn(5)
    assert equal(first, take(make(), 2)), "the global random stream has an influence"


@pytest.mark.parametrize("make", STREAMS)
def test_epochs_differ_in_order(make: Make) -> None:
    stream = make()
    steps = stream.steps_per_epoch
    assert steps > 2
    assert not equal(take(stream, steps), take(stream, steps))


@pytest.mark.parametrize("make", STREAMS)
def test_a_stream_resumes_exactly_at_every_position(make: Make) -> None:
    steps = make().steps_per_epoch
    for taken in (0, 1, steps - 1, steps, steps + 2, 2 * steps):
        stream = make()
        take(stream, taken)
        buffer = io.BytesIO()
        torch.save(stream.state_dict(), buffer)
        rest = take(stream, 2 * steps + 1)
        buffer.seek(0)
        other = make(seed=77)
        take(other, 1)
        other.load_state_dict(torch.load(buffer, weights_only=True))
        assert equal(rest, take(other, 2 * steps + 1)), f"differs after {taken} batches"


@pytest.mark.parametrize("make", STREAMS)
def test_a_state_is_a_snapshot(make: Make) -> None:
    stream = make()
    take(stream, 2)
    state = stream.state_dict()
    rest = take(stream, stream.steps_per_epoch + 1)
    stream.load_state_dict(state)
    assert equal(rest, take(stream, stream.steps_per_epoch + 1))


@pytest.mark.parametrize("make", STREAMS)
def test_batches_survive_the_next_epoch(make: Make) -> None:
    """APO keeps the previous batch: the stream must not write over it."""
    stream = make()
    kept = take(stream, stream.steps_per_epoch)
    copies = [[tensor.clone() for tensor in batch] for batch in kept]
    take(stream, stream.steps_per_epoch)
    assert equal(kept, copies)


@pytest.mark.parametrize("make", [plain_images, rows_of_a_table])
def test_an_epoch_has_no_example_twice_and_keeps_pairs_together(make: Make) -> None:
    stream = make()
    assert stream.steps_per_epoch == 4
    whole = Normalization()(IMAGES).flatten(1) if make is plain_images else IMAGES.float().flatten(1)
    for _ in range(3):
        batches = take(stream, 4)
        labels = torch.cat([target.flatten() for _, target in batches]).long()
        assert len(labels.unique()) == 20
        inputs = torch.cat([inputs.flatten(1) for inputs, _ in batches])
        assert torch.equal(inputs, whole[labels])


def test_augmented_images_are_crops_and_flips_of_their_originals() -> None:
    stream = augmented_images()
    normalize = Normalization((0.5,) * 3, (0.2,) * 3)
    size = 2 * PADDING + 1
    grid = torch.cartesian_prod(torch.arange(size), torch.arange(size), torch.arange(2))
    seen = set()
    for inputs, labels in take(stream, 8):
        for image, label in zip(inputs, labels.tolist(), strict=True):
            variants = crop_and_flip(IMAGES[label].expand(len(grid), -1, -1, -1), grid[:, :2], grid[:, 2].bool())
            matches = (normalize(variants) == image).flatten(1).all(1).nonzero().flatten().tolist()
            assert len(matches) == 1, "not one of the possible crops"
            seen.add(tuple(grid[matches[0]].tolist()))
    rows, columns, flips = ({entry[i] for entry in seen} for i in range(3))
    assert flips == {0, 1} and len(rows) > 5 and len(columns) > 5


def test_image_batches_have_the_type_asked_for() -> None:
    stream = ImageBatches(IMAGES, LABELS, 4, 0, normalize=Normalization(dtype=torch.bfloat16), augment=True)
    inputs, labels = stream.next()
    assert inputs.dtype == torch.bfloat16 and labels.dtype == torch.int64


def test_an_autoencoder_gets_its_inputs_as_targets() -> None:
    rows = IMAGES.float().flatten(1)
    inputs, targets = TableBatches(rows, rows, 6, 0).next()
    assert torch.equal(inputs, targets)


def test_text_batches_hold_every_pair_once_within_the_token_limit() -> None:
    stream = TextBatches(PAIRS, 30, seed=1)
    found = []
    for source, target_in, row in take(stream, stream.steps_per_epoch):
        assert source.numel() <= 30 and target_in.numel() <= 30 and row.shape == (target_in.numel(),)
        target_out = row.view_as(target_in)
        assert bool((target_in[:, 0] == 1).all())
        assert torch.equal(target_in[:, 1:] == 0, target_out[:, :-1].eq(0) | target_out[:, :-1].eq(2))
        for s, t in zip(source.tolist(), target_out.tolist(), strict=True):
            source_end, target_end = s.index(2), t.index(2)
            assert set(s[source_end + 1 :]) <= {0} and set(t[target_end + 1 :]) <= {0}
            found.append((s[:source_end], t[:target_end]))
    assert sorted(found) == sorted(PAIRS)


def test_text_batches_gather_sentences_of_like_length() -> None:
    stream = TextBatches(PAIRS, 30, seed=1)
    tokens = sum(source.ne(0).sum().item() + out.ne(0).sum().item() for (source, _), out in stream.in_order())
    padded = sum(source.numel() + out.numel() for (source, _), out in stream.in_order())
    assert tokens / padded > 0.7
    assert stream.steps_per_epoch < len(PAIRS) / 3


def test_too_long_pairs_are_left_out() -> None:
    stream = TextBatches([([5], [6]), ([5] * 9, [6])], max_tokens=8, seed=0)
    assert [source.tolist() for (source, _), _ in stream.in_order()] == [[[5, 2]]]
    with pytest.raises(ValueError, match=r"max_tokens must be .*, got 1"):
        TextBatches([([5], [6])], max_tokens=1, seed=0)


@pytest.mark.parametrize("make", STREAMS)
def test_a_state_from_another_kind_of_device_keeps_the_place_and_decides_the_order(make: Make) -> None:
    states = [{"generator": torch.arange(16, dtype=torch.uint8) + shift, "position": 2} for shift in (0, 0, 1)]
    streams = [make() for _ in states]
    for stream, state in zip(streams, states, strict=True):
        stream.load_state_dict(state)
    batches = [take(stream, 2 * stream.steps_per_epoch - 2) for stream in streams]
    assert equal(batches[0], batches[1]) and not equal(batches[0], batches[2])
    assert streams[0].state_dict()["position"] == streams[0].steps_per_epoch


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"batch_size must be from 1 to 23, .*, got 24"):
        ImageBatches(IMAGES, LABELS, 24, 0)
    with pytest.raises(ValueError, match="inputs and targets must have the same length, got 23 and 22"):
        TableBatches(IMAGES, LABELS[1:], 4, 0)
    with pytest.raises(TypeError, match=r"images must be torch\.uint8, as loaded, got torch\.float32"):
        ImageBatches(IMAGES.float(), LABELS, 4, 0)
    with pytest.raises(ValueError, match="state must be from the same stream, got position 5"):
        plain_images().load_state_dict({**plain_images().state_dict(), "position": 5})


@pytest.mark.gpu
@pytest.mark.parametrize("make", [ImageBatches, TableBatches])
def test_nothing_waits_for_the_host_on_a_gpu(make: type[ImageBatches] | type[TableBatches]) -> None:
    inputs = IMAGES if make is ImageBatches else IMAGES.float()
    options = {"augment": True} if make is ImageBatches else {}
    stream = make(inputs, LABELS, 5, 0, "cuda", **options)
    take(stream, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = take(stream, 3 * stream.steps_per_epoch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(tensor.is_cuda for batch in batches for tensor in batch)
    state = stream.state_dict()
    rest = take(stream, 6)
    stream.load_state_dict(state)
    assert equal(rest, take(stream, 6))

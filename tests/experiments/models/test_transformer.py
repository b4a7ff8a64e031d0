"""The Transformer looks only where it may, and decoding finds the likeliest translations."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from apo_experiments.models.transformer import Transformer, beam_search

PAD, BEGIN, END = 0, 1, 2


def tiny(**options: object) -> Transformer:
    settings: dict = {"layers": 2, "dimension": 16, "feed_forward": 24, "heads": 4} | options
    return Transformer(12, **settings).double().eval()


def words(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, 12, (batch, length))


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_word_does_not_see_later_words(norm_first):
    model, source, target = tiny(norm_first=norm_first), words(2, 5), words(2, 6)
    other = target.clone()
    other[:, 4:] = 3 + (other[:, 4:] - 2) % 9
    before, after = model(source, target), model(source, other)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_padding_of_source_and_target_changes_nothing():
    model, source, target = tiny(), words(2, 5), words(2, 6)
    padded_source = torch.cat([source, torch.full((2, 3), PAD)], dim=1)
    padded_target = torch.cat([target, torch.full((2, 2), PAD)], dim=1)
    padded = model(padded_source, padded_target)[:, :6]
    torch.testing.assert_close(padded, model(source, target), rtol=1e-12, atol=1e-12)


def test_word_order_matters():
    model, source, target = tiny(), words(1, 5), words(1, 4)
    assert not torch.allclose(model(source, target), model(source.flip(1), target))


def test_source_target_and_output_share_one_matrix_of_the_vocabulary():
    assert sum(p.shape[0] == 12 for p in tiny().parameters()) == 1


def test_paper_size_has_the_expected_number_of_weights():
    with torch.device("meta"):
        model = Transformer(10_000)
    attention, feed_forward, norm = 4 * (512 * 512 + 512), 2 * 512 * 1024 + 1024 + 512, 2 * 512
    encoder, decoder = attention + feed_forward + 2 * norm, 2 * attention + feed_forward + 3 * norm
    assert sum(p.numel() for p in model.parameters()) == 6 * (encoder + decoder) + 10_000 * 512


def test_every_projection_is_a_linear_layer_of_its_own():
    linear = [m for m in tiny().modules() if isinstance(m, nn.Linear)]
    assert len(linear) == 2 * (4 + 2) + 2 * (8 + 2)


def test_too_long_sentence_is_refused():
    with pytest.raises(ValueError, match="max_length"):
        tiny(max_length=4)(words(1, 5), words(1, 2))


def likelihood(model: Transformer, source: torch.Tensor, translation: list[int]) -> float:
    inputs = torch.tensor([[BEGIN, *translation[:-1]]])
    logits = model(source, inputs)[0].clone()
    logits[:, PAD] = -torch.inf
    return sum(row[word].item() for row, word in zip(logits.log_softmax(-1), translation, strict=True))


def test_greedy_takes_the_likeliest_word_each_time():
    model, source = tiny(), words(3, 4)
    translation = beam_search(model, source, BEGIN, END, max_length=5, width=1)
    for row in range(3):
        prefix = [BEGIN]
        for word in translation[row].tolist():
            logits = model(source[row : row + 1], torch.tensor([prefix]))[0, -1].clone()
            logits[PAD] = -torch.inf
            best = int(logits.argmax())
            assert word == (PAD if best == END else best)
            if best == END:
                break
            prefix.append(best)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(6))
def test_wide_beam_finds_the_best_of_all_translations(seed, penalty):
    torch.manual_seed(seed)
    model = Transformer(5, layers=1, dimension=8, feed_forward=8, heads=2).double().eval()
    source, length = torch.tensor([[3, 4, 4]]), 3
    candidates = [[*words, END] for size in range(length) for words in itertools.product([1, 3, 4], repeat=size)]
    candidates += [list(choice) for choice in itertools.product([1, 3, 4], repeat=length)]
    best = max(candidates, key=lambda candidate: likelihood(model, source, candidate) / len(candidate) ** penalty)
    found = beam_search(model, source, BEGIN, END, max_length=length, width=64, length_penalty=penalty)[0].tolist()
    expected = [PAD if word == END else word for word in best]
    assert found == expected + [PAD] * (len(found) - len(expected))


def test_sentences_of_a_batch_are_translated_as_if_alone():
    model, first, second = tiny(), words(1, 3), words(1, 5)
    batch = torch.cat([torch.cat([first, torch.full((1, 2), PAD)], dim=1), second])
    together = beam_search(model, batch, BEGIN, END, max_length=6, width=3)
    for row, source in enumerate((first, second)):
        alone = beam_search(model, source, BEGIN, END, max_length=6, width=3)[0]
        assert together[row].tolist()[: len(alone)] == alone.tolist()
        assert not together[row, len(alone) :].any()


def test_transformer_learns_to_copy_and_decodes_the_copy():
    torch.manual_seed(0)
    model = Transformer(12, layers=1, dimension=32, feed_forward=32, heads=2, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(400):
        source = words(64, 4)
        inputs = torch.cat([torch.full((64, 1), BEGIN), source], dim=1)
        outputs = torch.cat([source, torch.full((64, 1), END)], dim=1)
        loss = nn.functional.cross_entropy(model(source, inputs).flatten(0, 1), outputs.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.02:
            break
    source = words(8, 4)
    decoded = beam_search(model.eval(), source, BEGIN, END, max_length=6, width=1)
    assert (decoded[:, :4] == source).all(1).float().mean() >= 0.75

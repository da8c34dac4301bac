"""Colours: the scale is symmetric and monotone, the two directions stay apart for colour-blind readers."""

from __future__ import annotations

import numpy as np
import pytest

from keelscope_dashboards.theme import DARK, LIGHT, TICKS, Palette, colour_table, colourscale, symlog, symlog_inverse

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
PROTANOPIA = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
DEUTERANOPIA = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
TO_XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]


def linear(srgb: np.ndarray) -> np.ndarray:
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def cielab(rgb: np.ndarray) -> np.ndarray:
    xyz = rgb @ np.array(TO_XYZ).T / np.array([0.95047, 1.0, 1.08883])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)


def luminance(colour: str) -> float:
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return float(linear(rgb) @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    high, low = sorted([luminance(one), luminance(other)], reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=lambda palette: palette.name)
@pytest.mark.parametrize("seen", [np.eye(3), np.array(PROTANOPIA), np.array(DEUTERANOPIA)])
def test_a_loss_and_a_gain_look_different_to_everybody(palette: Palette, seen: np.ndarray) -> None:
    table = linear(colour_table(palette) / 255.0)
    lab = cielab(np.clip(table @ seen.T, 0, 1))
    apart = np.linalg.norm(lab - lab[::-1], axis=1)
    one_decade = round(127 * (1 + symlog(np.array([1.0]))[0]))
    assert apart[one_decade:].min() > 16


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=lambda palette: palette.name)
def test_lightness_moves_one_way_from_the_middle(palette: Palette) -> None:
    lightness = cielab(linear(colour_table(palette) / 255.0))[:, 0]
    sign = -1 if palette is LIGHT else 1
    assert (np.diff(lightness[127:]) * sign > -0.3).all()
    assert (np.diff(lightness[:128]) * sign < 0.3).all()


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=lambda palette: palette.name)
def test_text_and_lines_can_be_read(palette: Palette) -> None:
    assert contrast(palette.text, palette.paper) > 7
    assert contrast(palette.muted, palette.paper) > 4.5
    assert min(contrast(colour, palette.paper) for colour in palette.runs) > 3.5
    assert len(set(palette.runs)) == 8


def test_the_scale_shows_a_tenth_and_sixteen_decades() -> None:
    at = symlog(np.array([-16.0, -0.1, 0.0, 0.1, 3.0, 16.0]))
    assert at[0] == -1
    assert at[-1] == 1
    assert 0.03 < at[3] < 0.1
    assert 0.5 < at[4] < 0.6
    np.testing.assert_allclose(at[1], -at[3])
    np.testing.assert_allclose(symlog_inverse(symlog(np.array(TICKS, dtype=float))), TICKS, atol=1e-12)


def test_the_plotly_scale_is_in_true_decades() -> None:
    scale = colourscale(LIGHT, 65)
    positions = [position for position, _ in scale]
    assert positions == sorted(positions)
    assert (positions[0], positions[32], positions[-1]) == (0, 0.5, 1)

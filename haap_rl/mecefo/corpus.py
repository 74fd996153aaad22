"""A small English-like text to learn, made from a seed: no download, and the same on every machine.

Stories of people who hand things to each other. Spelling and word order are local; who has what, and what a pronoun
stands for, has to be looked up some sentences earlier, which takes attention.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import torch
from torch import Tensor

NAMES = ("ana", "bob", "carol", "dave", "eve", "frank", "grace", "hugo", "ida", "jack", "kate", "liam")
PRONOUN = dict(zip(NAMES, ("she", "he") * 6, strict=True))
THINGS = ("apple", "book", "candle", "drum", "fork", "globe", "hat", "jar", "key", "lamp", "map", "pen", "rope", "vase")
COLORS = ("amber", "black", "brown", "green", "grey", "pink", "red", "white", "yellow")
PLACES = ("attic", "barn", "cellar", "garden", "hall", "kitchen", "market", "office", "park", "tower")
ALPHABET = " .,abcdefghijklmnopqrstuvwxyz"


def text(characters: int, seed: int) -> str:
    """At least `characters` characters of ALPHABET. Only random() is drawn, whose sequence Python promises to keep."""
    draw = random.Random(seed).random

    def one(of: Sequence[str]) -> str:
        return of[int(draw() * len(of))]

    sentences: list[str] = []
    length = 0
    while length < characters:
        giver, taker = one(NAMES), one(NAMES)
        thing, place = f"{one(COLORS)} {one(THINGS)}", one(PLACES)
        story = [f"{giver} found the {thing} in the {place}.", f"{PRONOUN[giver]} took it from the {place}"]
        if draw() < 0.6 and taker != giver:
            story[-1] += f", and gave it to {taker}."
            story.append(f"now {taker} has the {thing}, and {giver} left the {place}.")
        else:
            story[-1] += "."
            story.append(f"now {giver} has the {thing}.")
        if draw() < 0.5:
            story.append(f"the {thing.split()[1]} is {thing.split()[0]}.")
        sentences += story
        length += sum(len(sentence) + 1 for sentence in story)
    return " ".join(sentences)


@functools.cache
def corpus(characters: int, seed: int) -> Tensor:
    """The text as numbers of characters, (characters,)."""
    number = {character: i for i, character in enumerate(ALPHABET)}
    return torch.tensor([number[character] for character in text(characters, seed)[:characters]])

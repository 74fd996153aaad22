"""HTML and SVG as strings: what is text is escaped, what is markup already is not."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Sequence

EMPTY = ("meta",)  # elements of HTML that have no end tag


class Markup(str):
    """Text that is HTML or SVG already."""

    __slots__ = ()


def element(name: str, /, *content: object, **attributes: object) -> Markup:
    """`<name attribute="...">content</name>`; content that is no Markup is escaped, None is left out.

    An attribute's trailing underscore is dropped and others are hyphens: class_="note", aria_label="a picture".
    Floats among the attributes are coordinates: they keep one decimal.
    """
    start = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(_short(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{start}>" if name in EMPTY else f"<{name}{start}>{joined(*content)}</{name}>")


def joined(*content: object) -> Markup:
    """The pieces of content one after another, escaped where they are no Markup."""
    return Markup(
        "".join(part if isinstance(part, Markup) else _escaped(str(part)) for part in content if part is not None)
    )


def _escaped(text: str) -> str:
    """Text for content and attributes, without the characters that HTML forbids."""
    if not text.isprintable():
        text = "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs", "Cn") and c != "\n" else c for c in text)
    return html.escape(text)


def _short(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """A table in a frame that scrolls sideways; columns of numbers are those whose name begins with "#"."""
    kinds = ["n" if name.startswith("#") else None for name in columns]
    head = [
        element("th", name.lstrip("#"), class_=kind, scope="col") for name, kind in zip(columns, kinds, strict=True)
    ]
    body = [
        element("tr", *(element("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)))
        for row in rows
    ]
    parts = (
        element("caption", element("span", caption)),
        element("thead", element("tr", *head)),
        element("tbody", *body),
    )
    return element("div", element("table", *parts), class_="scroll")

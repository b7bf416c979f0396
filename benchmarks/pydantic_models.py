"""Twenty models of pydantic's, as people write them, whose schemas are taken as `model_json_schema()` gives them.

None says what else an object may have, so by the standard each could have anything. Lengths are bounded where a small
model would not come to an end: the schema is what is tried here, not the patience of the model.
"""

from __future__ import annotations

import datetime
import enum
import uuid
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Word = Annotated[str, Field(max_length=20)]
Line = Annotated[str, Field(max_length=80)]


class Person(BaseModel):
    """Plain fields."""

    name: Word
    age: int = Field(ge=0, le=120)


class Address(BaseModel):
    """A pattern."""

    street: Line
    city: Word
    postcode: str = Field(pattern=r"^[0-9]{4,5}$")


class Customer(BaseModel):
    """A nested model, optional and not."""

    name: Word
    address: Address
    billing: Address | None = None


class Status(enum.StrEnum):
    """States of a ticket."""

    OPEN = "open"
    WAITING = "waiting"
    CLOSED = "closed"


class Priority(enum.IntEnum):
    """How soon."""

    LOW = 1
    HIGH = 2


class Ticket(BaseModel):
    """Enumerations, one with a default."""

    title: Line
    status: Status
    priority: Priority = Priority.LOW


class Sentiment(BaseModel):
    """What a classifier returns."""

    label: Literal["positive", "negative", "neutral"]
    confidence: float = Field(ge=0, le=1)


class Meeting(BaseModel):
    """Dates and times."""

    topic: Line
    day: datetime.date
    start: datetime.time
    minutes: int = Field(gt=0, le=240, multiple_of=15)


class Event(BaseModel):
    """An id and a moment, which may be missing."""

    id: uuid.UUID
    name: Word
    at: datetime.datetime
    until: datetime.datetime | None = None


class Ingredient(BaseModel):
    """A part of a recipe."""

    name: Word
    amount: float = Field(gt=0, lt=1000)
    unit: Literal["g", "ml", "piece"]


class Recipe(BaseModel):
    """Lists of models and of texts."""

    title: Word
    ingredients: list[Ingredient] = Field(min_length=1, max_length=3)
    steps: list[Line] = Field(min_length=1, max_length=3)


class Inventory(BaseModel):
    """A dictionary of numbers."""

    shop: Word
    stock: dict[Annotated[str, Field(pattern="^[a-z]{1,10}$")], int] = Field(max_length=3)


class Grades(BaseModel):
    """A dictionary of lists."""

    student: Word
    grades: dict[str, Annotated[list[Annotated[int, Field(ge=1, le=6)]], Field(max_length=4)]] = Field(max_length=3)


class Comment(BaseModel):
    """A model that contains itself."""

    text: Line
    replies: list[Comment] = Field(default=[], max_length=1)


class Folder(BaseModel):
    """A model that contains itself as an optional field."""

    name: Word
    inside: Folder | None = None


class Cat(BaseModel):
    """One of two kinds."""

    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    """The other kind."""

    kind: Literal["dog"]
    good: bool
    breed: Word | None = None


class Household(BaseModel):
    """A union that is told apart by a field."""

    town: Word
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = Field(min_length=1, max_length=2)


class Answer(BaseModel):
    """A union of types."""

    value: int | float | bool | Word | None
    sources: list[Word] = Field(default_factory=list, max_length=2)


class Route(BaseModel):
    """Tuples."""

    start: tuple[Annotated[int, Field(ge=-90, le=90)], Annotated[int, Field(ge=-180, le=180)]]
    stops: list[tuple[Word, int]] = Field(max_length=2)


class Settings(BaseModel):
    """Defaults everywhere, so that nothing is required, and an alias."""

    theme: Literal["light", "dark"] = "light"
    volume: int = Field(default=5, ge=0, le=11)
    font_size: int = Field(default=12, alias="fontSize", ge=6, le=72)


class Invoice(BaseModel):
    """A model within it that forbids what else there may be."""

    class Note(BaseModel):
        """A remark."""

        model_config = ConfigDict(extra="forbid")
        text: Line

    number: str = Field(pattern="^INV-[0-9]{4}$")
    total: float = Field(ge=0, le=10_000)
    paid: bool
    notes: list[Note] = Field(default=[], max_length=1)


class Empty(BaseModel):
    """No fields: the one answer is {}."""


class Song(BaseModel):
    """Two levels of nesting, lists and options."""

    class Album(BaseModel):
        """Where it came out."""

        title: Word
        year: int = Field(ge=1900, le=2100)
        tags: list[Literal["rock", "pop", "jazz"]] = Field(max_length=2)

    title: Word
    artists: list[Person] = Field(min_length=1, max_length=2)
    album: Album | None


class Page(BaseModel):
    """A list of models that refer to others, with a cursor."""

    items: list[Customer] = Field(max_length=1)
    next: str | None = Field(default=None, pattern="^[a-f0-9]{8}$")


MODELS: dict[str, type[BaseModel]] = {
    model.__name__.lower(): model
    for model in (Person, Customer, Ticket, Sentiment, Meeting, Event, Recipe, Inventory, Grades, Comment, Folder,
                  Household, Answer, Route, Settings, Invoice, Empty, Song, Page, Address)
}  # fmt: skip

"""The pydantic models whose objects several clients ask for; strings and lists have bounds, so a small model ends."""

from __future__ import annotations

from typing import Literal

import pydantic


class Town(pydantic.BaseModel):
    """A town."""

    name: str = pydantic.Field(max_length=12)
    large: bool


class Stop(pydantic.BaseModel):
    """A stop of a train."""

    town: Literal["Bern", "Chur", "Olten"]
    minute: int = pydantic.Field(ge=0, le=59)


class Train(pydantic.BaseModel):
    """A train and where it stops; what else it might have the schema does not say."""

    name: str = pydantic.Field(max_length=12)
    fast: bool
    stops: list[Stop] = pydantic.Field(min_length=1, max_length=2)

"""The line of the user's code that is running, for errors."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_LIBRARIES = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).resolve().parent.parent}/")


def user_line() -> str:
    """The innermost line outside of torch and zgraph, such as "train.py:12 in step"; "" if there is none."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((*_LIBRARIES, "<")):
            return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""


def line_of(error: BaseException) -> str:
    """The innermost line outside of torch and zgraph that an error came through, like `user_line`."""
    found, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith((*_LIBRARIES, "<")):
            found = f"{Path(code.co_filename).name}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return found

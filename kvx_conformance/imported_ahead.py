"""Does a subject's imports, in the process that those of its engines are forked from.

A subject may have `import_ahead`, a function without arguments.
"""

from __future__ import annotations

import os
from contextlib import suppress

from kvx_conformance.subjects import SUBJECT, load

with suppress(Exception):  # it is raised again, and told, where an engine starts
    load(os.environ[SUBJECT]).import_ahead()

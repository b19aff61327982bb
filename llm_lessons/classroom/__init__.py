"""How the course is taught: pictures, widgets and checks. The engine never imports this.

A lesson takes what it needs: `from llm_lessons.classroom import check, plots, widgets`.
"""

from . import checks as check

"""Names a cited work by its authors and its year, ``[Tillet et al., 2019]``, in the text and in the references."""

from pybtex.database import Entry
from pybtex.plugin import register_plugin
from pybtex.style.formatting.alpha import Style
from pybtex.style.labels.alpha import LabelStyle
from pybtex.style.sorting import BaseSortingStyle


class _Label(LabelStyle):
    """The base class tells works apart that would have the same name: 2026a, 2026b."""

    def format_label(self, entry: Entry) -> str:
        # Braces keep the name of an organisation in one piece.
        names = [" ".join(author.prelast_names + author.last_names).strip("{}") for author in entry.persons["author"]]
        authors = f"{names[0]} et al." if len(names) > 2 else " and ".join(names)
        return f"{authors}, {entry.fields['year']}"


class _Sorting(BaseSortingStyle):
    def sorting_key(self, entry: Entry) -> str:
        return _Label().format_label(entry).lower()


class _Style(Style):
    default_label_style, default_sorting_style = _Label, _Sorting


def setup(app) -> dict:
    register_plugin("pybtex.style.formatting", "author_year", _Style)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

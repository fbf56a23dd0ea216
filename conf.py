"""Sphinx settings. Run from the top of the repository: sphinx-build -c . docs build/html"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "docs" / "_ext"))

import triton_gallery  # before triton: without a GPU it switches the interpreter on

project = "Triton Gallery"
author = "the Triton Gallery contributors"
copyright = "the Triton Gallery contributors, MIT license"
version = release = triton_gallery.__version__

extensions = [
    "bundle",  # docs/_ext
    "figures",
    "findable",
    "finish",
    "gallery",  # before sphinx_gallery: it writes the pages that sphinx_gallery executes
    "guide",
    "inventories",
    "kernels",
    "mathml",
    "measured",
    "records",
    "references",
    "run",
    "solutions",
    "terms",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
    "matplotlib.sphinxext.plot_directive",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_reredirects",
    "sphinxcontrib.bibtex",
]
templates_path = ["docs/_templates"]
exclude_patterns = ["_generated", "_inventories"]
default_role = "code"
nitpick_ignore_regex = [
    ("py:class", r"(tl|gl)\..*"),  # the types of a kernel's arguments: Triton's documentation has no entries for them
]

# API pages
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
add_module_names = False

# The gallery; folders are relative to docs/
sphinx_gallery_conf = {
    "examples_dirs": "_generated/examples",
    "gallery_dirs": "getting-started/tutorials",
    "filename_pattern": r"/\d\d-",
    "within_subsection_order": "FileNameSortKey",
    "backreferences_dir": "python-api/generated",
    "doc_module": ("triton_gallery",),
    "image_scrapers": ("figures.scraper",),
    "default_thumb_file": str(Path("docs/_static/attention.svg").absolute()),  # in `make html-fast`
    "reset_modules": ("matplotlib", "gallery.seed"),
    "ignore_repr_types": r"matplotlib\.",  # what a plotting call returns says nothing
    "inspect_global_variables": False,  # in code, link functions and not variables
    "notebook_images": True,
    "remove_config_comments": True,
    "write_computation_times": False,
    "show_signature": False,
}

# The guide; files are relative to this one
bibtex_bibfiles = ["docs/refs.bib"]
bibtex_default_style, bibtex_reference_style = "author_year", "label"
plot_html_show_source_link = False
plot_html_show_formats = False
plot_formats = ["svg"]
plot_rcparams = {"svg.hashsalt": "triton-gallery"}
copybutton_selector = "div:not(.run-output, .sphx-glr-script-out) > .highlight > pre"
copybutton_exclude = ".linenos, .gp, .go"

# Finding pages; with GALLERY_URL, the address of the published site, also for search engines and links elsewhere
html_baseurl = f"{os.environ['GALLERY_URL'].rstrip('/')}/stable/" if os.environ.get("GALLERY_URL") else ""
notfound_template = "404.html"
redirects = {}  # the old name of each page that moved, without .html: its new path from there; a test asks for them
redirect_html_template_file = "docs/_templates/redirect.html"
ogp_image = "_static/social.png"

html_theme = "sphinx_rtd_theme"
html_theme_options = {"navigation_depth": 3, "collapse_navigation": False, "titles_only": True}
html_title = project
html_favicon = "docs/_static/favicon.svg"
html_static_path = ["docs/_static"]
html_css_files, html_js_files = ["gallery.css"], ["gallery.js"]
html_math_renderer = "mathml"
html_search_scorer = "docs/_templates/scorer.js"
html_domain_indices = False

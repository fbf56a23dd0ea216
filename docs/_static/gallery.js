// What the theme and sphinx-gallery leave out for readers who use a keyboard, a screen reader or a dark room.

// --- dark and light: a click goes on to the next choice, and the browser remembers it ---
const root = document.documentElement;
const choices = ["auto", "dark", "light"];

function choose(theme) {
  root.dataset.mode = theme;
  for (const button of document.querySelectorAll(".theme-choice")) button.textContent = `Theme: ${theme}`;
}

function chooseNext() {
  const theme = choices[(choices.indexOf(root.dataset.mode) + 1) % choices.length];
  localStorage.setItem("theme", theme);
  choose(theme);
}

// --- a box that scrolls must be reachable by keyboard; which one does depends on the width of the window ---
// And the eye must see that there is more of it.
const BOXES =
  ".highlight pre, .wy-table-responsive, dt.sig, div.math, span.math, .output_html [role=region], a.figure";

const hasMore = (box) => box.scrollLeft + box.clientWidth < box.scrollWidth - 1;

function markScrollingBoxes() {
  const boxes = [...document.querySelectorAll(BOXES)];
  // First all questions, then all answers: in turns, the browser would lay the page out anew for each box.
  const scrolls = boxes.map((box) => box.scrollWidth > box.clientWidth + 1 || box.scrollHeight > box.clientHeight + 1);
  const more = boxes.map(hasMore);
  boxes.forEach((box, i) => {
    box.toggleAttribute("data-more", more[i]);
    if (!scrolls[i]) box.removeAttribute("tabindex");
    else if (box.tabIndex !== 0) box.tabIndex = 0;
  });
}

function markScrolled({ target }) {
  if (target.matches?.(BOXES)) target.toggleAttribute("data-more", hasMore(target));
}

// Once for all that happens before the next picture of the page, which needs the layout anyway.
let nextMarking = 0;

function markSoon() {
  cancelAnimationFrame(nextMarking);
  nextMarking = requestAnimationFrame(markScrollingBoxes);
}

// From a folder the browser lets no page read another, so a search shows no passages there.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// What a search shows of a page are its words: neither where to download it, nor formulas, whose letters run together.
const NO_WORDS = /<div class="sphx-glr-download-link-note[\s\S]*?<\/div>|<math[\s\S]*?<\/math>/g;

document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search !== "undefined") {
    const { htmlToText, makeSearchSummary } = Search;
    Search.htmlToText = (html, anchor) => htmlToText(html.replace(NO_WORDS, ""), anchor);
    // Nor halves of words.
    Search.makeSearchSummary = (...page) => {
      const passage = makeSearchSummary(...page);
      if (passage) passage.textContent = passage.textContent.replace(/^\.{3}\S*/, "…").replace(/\S*\.{3}$/, "…");
      return passage;
    };
  }
  if (choices.includes(root.dataset.mode)) choose(root.dataset.mode);
  for (const button of document.querySelectorAll(".theme-choice")) button.addEventListener("click", chooseNext);

  // The theme puts boxes around tables, and a search brings results.
  new MutationObserver(markSoon).observe(document.body, { childList: true, subtree: true });

  // The list of the page's sections is open where it has a place of its own beside the text.
  const list = document.querySelector(".on-this-page");
  const wide = matchMedia("(min-width: 90rem)");
  const follow = () => {
    list.open = wide.matches;
    // There it has nothing to open.
    list.querySelector("summary").tabIndex = wide.matches ? -1 : 0;
  };
  if (list) {
    follow();
    wide.addEventListener("change", follow);
  }

  const menu = document.querySelector(".wy-nav-top button");
  const side = document.querySelector(".wy-nav-side");
  new MutationObserver(() => menu.setAttribute("aria-expanded", side.classList.contains("shift"))).observe(side, {
    attributeFilter: ["class"],
  });
  // The theme scrolls the menu to the entry of the page, which Chromium takes for the place from where Tab goes on.
  const scroller = side.querySelector(".wy-side-scroll");
  for (const link of side.querySelectorAll(".wy-menu-vertical a")) {
    link.scrollIntoView = () => {
      scroller.scrollTop += link.getBoundingClientRect().top - scroller.getBoundingClientRect().top;
    };
  }
  document.addEventListener("click", ({ target }) => {
    if (side.classList.contains("shift") && !target.closest(".wy-nav-side, .wy-nav-top, .rst-versions")) menu.click();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && side.classList.contains("shift")) {
      menu.click();
      menu.focus();
    }
  });
});
for (const event of ["load", "resize"]) window.addEventListener(event, markSoon);
// What stands in a fold has no size before it is opened.
document.addEventListener("toggle", markSoon, true);
document.addEventListener("scroll", markScrolled, true);

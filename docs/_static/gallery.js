// What the theme and sphinx-gallery leave out for readers who use a keyboard or a screen reader.
document.addEventListener("DOMContentLoaded", () => {
  for (const caption of document.querySelectorAll(".caption[role=heading]")) {
    caption.setAttribute("aria-level", "2");
  }
  // A thumbnail's link lies over the card and has no text of its own.
  for (const card of document.querySelectorAll(".sphx-glr-thumbcontainer")) {
    const title = card.querySelector(".sphx-glr-thumbnail-title");
    const link = card.querySelector("p a");
    if (title && link) link.setAttribute("aria-label", title.textContent.trim());
  }
  // A box that scrolls must be reachable by keyboard; a solution's boxes have no size before it is opened.
  const makeReachable = (root) => {
    for (const box of root.querySelectorAll(".highlight pre, .wy-table-responsive, dt.sig, div.math")) {
      if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) box.tabIndex = 0;
    }
  };
  makeReachable(document);
  document.addEventListener("toggle", (event) => makeReachable(event.target), true);
  const footer = document.querySelector("footer");
  footer?.querySelector("[role=contentinfo]")?.removeAttribute("role");
  footer?.setAttribute("role", "contentinfo");
});

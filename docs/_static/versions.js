// What a published page learns from versions.js at the root, which knows the versions that came after this page's own.
// docs/_ext/publish.py wrote the same for the versions that it knew; without scripts, that remains.
(() => {
  const { version, page } = document.currentScript.dataset;
  const published = window.GALLERY_VERSIONS;
  if (!published) return;
  const root = "../".repeat(page.split("/").length);

  const link = (target) => {
    const a = document.createElement("a");
    // A version that lacks this page opens at its first one.
    a.href = `${root}${target.name}/${target.pages.includes(page) ? page : "index.html"}`;
    a.textContent = target.name;
    if (target.name === version) a.setAttribute("aria-current", "true");
    return a;
  };

  const own = published.versions.find(({ name }) => name === version);
  const newest = published.versions.find(({ name }) => name === published.newest);
  const banner = document.querySelector(".version-banner[data-banner]");
  if (banner && own && newest && newest !== own && newest.kind === "tag") {
    const what = own.kind === "tag" ? "an old version" : "the development version";
    banner.replaceChildren(`This is ${what}, ${version}. The newest release is `, link(newest), ".");
    banner.hidden = false;
  }

  document.addEventListener("DOMContentLoaded", () => {
    const list = document.querySelector(".rst-other-versions [data-versions]");
    list?.replaceChildren(
      ...[["Tags", "tag"], ["Branches", "branch"]].flatMap(([title, kind]) => {
        const members = published.versions.filter((member) => member.kind === kind);
        if (!members.length) return [];
        const group = document.createElement("dl");
        const term = document.createElement("dt");
        term.textContent = title;
        group.append(term);
        for (const member of members) {
          const item = document.createElement("dd");
          item.append(link(member));
          group.append(item);
        }
        return [group];
      }),
    );
  });
})();

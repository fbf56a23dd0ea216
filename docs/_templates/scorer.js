// The order of search results: what explains comes before the kernels that happen to have the word in their names.
var Scorer = {
  score([docname, title, anchor, descr, score]) {
    const isTutorial = /^getting-started\/tutorials\/\d/.test(docname);
    const isKernel = /(^|\.)_\w+$/.test(title);
    // Sphinx gives an object 16 points for its whole name and 11 for a part of it, a title up to 15 and a text 5.
    return score + (isTutorial ? 5 : 0) - (isKernel && score < 16 ? 9 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

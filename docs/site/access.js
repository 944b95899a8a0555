// What scrolls sideways can be reached by the keyboard. The theme's buttons in blocks of code are no landmarks, nor are
// the parts of a table of contents: one is called as a part of the menu is, where a class has its name.
const reach = (box) => {
  if (box.scrollWidth > box.clientWidth) box.tabIndex = 0
  else box.removeAttribute("tabindex")
}
const sizes = new ResizeObserver((entries) => {
  // the theme takes blocks of code out again at the same moment
  setTimeout(() => entries.forEach(({ target }) => reach(target)), 150)
})
for (const box of document.querySelectorAll(".md-typeset pre > code, .scrolls, .formula")) sizes.observe(box)
for (const part of document.querySelectorAll(".md-nav--secondary nav")) {
  part.setAttribute("role", "none")
  part.removeAttribute("aria-label")
}
new MutationObserver(() => {
  for (const bar of document.querySelectorAll("nav.md-code__nav:not([role])")) bar.setAttribute("role", "none")
}).observe(document.body, { childList: true, subtree: true })

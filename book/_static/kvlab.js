// Formulas wider than the page scroll; give those a tab stop, so that a keyboard can scroll them too.
(() => {
  const setTabStops = () =>
    document.querySelectorAll('mjx-container[display="true"]').forEach((formula) => {
      if (formula.scrollWidth > formula.clientWidth) formula.tabIndex = 0;
      else formula.removeAttribute("tabindex");
    });
  window.addEventListener("load", () => window.MathJax?.startup?.promise?.then(setTabStops));
  window.addEventListener("resize", setTabStops);
})();

// The top five of a cell, beside it. Texts are set as text, so that a token is never markup.
function show(event) {
  const tip = element.querySelector(".ed-tip");
  const cell = event.target.closest("td[data-tip]");
  if (!tip) return;
  tip.hidden = !cell;
  if (!cell) return;
  tip.replaceChildren(
    ...cell.dataset.tip.split("\n").map((line) => {
      const row = document.createElement("div");
      for (const part of line.split("\t")) {
        const span = document.createElement("span");
        span.textContent = part;
        row.append(span);
      }
      return row;
    }),
  );
  const box = cell.getBoundingClientRect();
  const left = Math.min(box.left, window.innerWidth - tip.offsetWidth - 8);
  const below = box.bottom + tip.offsetHeight + 8 < window.innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${below ? box.bottom + 4 : box.top - tip.offsetHeight - 4}px`;
}
element.addEventListener("mouseover", show);
element.addEventListener("click", show);
element.addEventListener("mouseleave", () => {
  const tip = element.querySelector(".ed-tip");
  if (tip) tip.hidden = true;
});

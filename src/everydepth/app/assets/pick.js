element.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-row]");
  if (button) trigger("click", { row: Number(button.dataset.row) });
});

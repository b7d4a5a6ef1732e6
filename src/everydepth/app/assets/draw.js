const canvas = element.querySelector("canvas");
const pen = canvas.getContext("2d");
let last = null;
function clear() {
  pen.fillStyle = "black";
  pen.fillRect(0, 0, canvas.width, canvas.height);
}
function place(event) {
  const box = canvas.getBoundingClientRect();
  return [
    ((event.clientX - box.left) * canvas.width) / box.width,
    ((event.clientY - box.top) * canvas.height) / box.height,
  ];
}
function line(from, to) {
  pen.strokeStyle = "white";
  pen.lineWidth = 30;
  pen.lineCap = "round";
  pen.beginPath();
  pen.moveTo(...from);
  pen.lineTo(...to);
  pen.stroke();
}
clear();
canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  last = place(event);
  line(last, last);
});
canvas.addEventListener("pointermove", (event) => {
  if (!last) return;
  const now = place(event);
  line(last, now);
  last = now;
});
canvas.addEventListener("pointerup", () => {
  if (!last) return;
  last = null;
  trigger("submit", { picture: canvas.toDataURL("image/png") });
});
element.querySelector(".ed-clear").addEventListener("click", clear);

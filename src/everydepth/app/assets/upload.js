// The picture is sent as text within the event, as a drawing is: no file is written on the way.
const LARGEST = 8 * 2 ** 20;
const zone = element.querySelector("label");
const input = element.querySelector("input");
const words = element.querySelector("p");
const usual = words.textContent;
function send(file) {
  if (!file) return;
  words.textContent = file.size > LARGEST ? "larger than 8 MB: make it smaller" : usual;
  if (file.size > LARGEST) return;
  const reader = new FileReader();
  reader.addEventListener("load", () => trigger("submit", { picture: reader.result }));
  reader.readAsDataURL(file);
}
input.addEventListener("change", () => send(input.files[0]));
zone.addEventListener("dragover", (event) => event.preventDefault());
zone.addEventListener("drop", (event) => {
  event.preventDefault();
  send(event.dataTransfer.files[0]);
});

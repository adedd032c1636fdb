"use strict";
// What a figure says where one points, on a mouse or with a finger.
const tip = document.getElementById("tip");
let mark = null;

function hide() {
  tip.hidden = true;
  if (mark) mark.remove();
  mark = null;
}

function show(event, drawing, text, place) {
  hide();
  if (!text) return;
  mark = document.createElement("div");
  mark.className = place.width ? "mark" : "mark dot";
  for (const [side, share] of Object.entries(place)) mark.style[side] = 100 * share + "%";
  drawing.append(mark);
  tip.textContent = text;
  tip.hidden = false;
  const own = tip.getBoundingClientRect();
  const left = Math.min(Math.max(event.clientX - own.width / 2, 8), innerWidth - own.width - 8);
  const above = event.clientY - own.height - 18;
  tip.style.left = left + "px";
  tip.style.top = (above > 8 ? above : event.clientY + 22) + "px";
}

function cellUnder(said, box, x, y) {
  const [left, top, right, bottom] = box;
  const rows = said.rows.length, columns = said.columns.length;
  const column = Math.floor((x - left) / (right - left) * columns);
  const row = Math.floor((y - top) / (bottom - top) * rows);
  if (column < 0 || row < 0 || column >= columns || row >= rows) return null;
  let value = said.text ? said.text[row][column] : null;
  if (said.z) {
    const level = said.levels[row * columns + column] / 255;
    value = (said.low + level * (said.high - said.low)).toPrecision(2) + said.unit;
  }
  const where = [said.rows[row], said.columns[column]].filter(Boolean).join(", ");
  const width = (right - left) / columns, height = (bottom - top) / rows;
  return [value && (where ? where + ": " + value : value),
    { left: left + column * width, top: top + row * height, width, height }];
}

function pointUnder(points, x, y, size) {
  let best = null, least = 26;
  for (const [left, top, text] of points) {
    const away = Math.hypot((left - x) * size.width, (top - y) * size.height);
    if (away < least) { least = away; best = [text, { left, top }]; }
  }
  return best;
}

for (const data of document.querySelectorAll("script.hover")) {
  const said = JSON.parse(data.textContent);
  if (said.z) said.levels = Uint8Array.from(atob(said.z), c => c.charCodeAt(0));
  for (const drawing of data.parentElement.querySelectorAll(".drawing")) {
    const at = said.at[drawing.dataset.width];
    const svg = drawing.querySelector("svg");
    const point = event => {
      const size = svg.getBoundingClientRect(), whole = drawing.getBoundingClientRect();
      const x = (event.clientX - size.left) / size.width, y = (event.clientY - size.top) / size.height;
      const found = said.rows ? cellUnder(said, at, x, y) : pointUnder(at, x, y, size);
      if (!found) return hide();
      const place = {};  // shares of the drawing, which may be wider than its svg
      for (const [side, share] of Object.entries(found[1])) {
        const along = side === "left" || side === "width" ? "width" : "height";
        place[side] = share * size[along] / whole[along];
      }
      show(event, drawing, found[0], place);
    };
    drawing.addEventListener("pointermove", point);
    drawing.addEventListener("pointerdown", point);
    drawing.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") hide(); });
  }
}
addEventListener("scroll", hide, { passive: true });
addEventListener("pointerdown", event => { if (!event.target.closest(".drawing")) hide(); });

for (const choice of document.querySelectorAll(".choice")) {
  const buttons = [...choice.querySelectorAll(".bar button")];
  const options = [...choice.querySelectorAll(".option")];
  const choose = chosen => options.forEach((option, i) => {
    option.hidden = i !== chosen;
    buttons[i].setAttribute("aria-pressed", i === chosen);
  });
  buttons.forEach((button, i) => button.addEventListener("click", () => choose(i)));
  choice.querySelector(".bar").hidden = buttons.length < 2;
  choose(0);
}

for (const button of document.querySelectorAll(".copy")) {
  if (!navigator.clipboard) continue;  // a page from a disk may not have it
  button.hidden = false;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.previousElementSibling.textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}

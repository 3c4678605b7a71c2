// Access to the document. Text from the sidecar enters it through textContent alone: names are written by others.

const SVG = "http://www.w3.org/2000/svg";

/** Return the element with an id. */
export const at = (id) => document.getElementById(id);

/** Set a text, if it is another one: what does not change is not announced again. */
export function text(node, value) {
  const shown = value === null || value === undefined ? "–" : String(value);
  if (node.textContent !== shown) node.textContent = shown;
}

/** Show an element, or hide it. */
export function show(node, isShown) {
  if (node.hidden === isShown) node.hidden = !isShown;
}

/** Set an attribute, or remove it where the value is null. */
export function attribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** Return a new element with a class, a text and children. */
export function make(tag, className, content, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (content !== undefined && content !== null) node.textContent = content;
  node.append(...children);
  return node;
}

/** Set the value of a progress element between 0 and 1, with a text for those who do not see it. */
export function progress(node, share, label) {
  const bounded = Math.min(1, Math.max(0, share));
  if (node.value !== bounded) node.value = bounded;
  attribute(node, "aria-valuetext", label);
}

/** Return a sign: an outline in a box of 24 by 24. */
export function sign(path) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  const line = document.createElementNS(SVG, "path");
  line.setAttribute("d", path);
  svg.append(line);
  return svg;
}

/** Make the children of a list the same as texts. */
export function texts(list, values) {
  while (list.children.length > values.length) list.lastElementChild.remove();
  while (list.children.length < values.length) list.append(document.createElement("li"));
  values.forEach((value, index) => text(list.children[index], value));
}

// Elements, made one by one: the pages' policy refuses to make them of text, so none can run.

const SVG = "http://www.w3.org/2000/svg";

// Shapes of a 24 × 24 grid, drawn as strokes of the text's colour.
const STROKES = {
  send: "M12 19V5M6 11l6-6 6 6",
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  minus: "M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h10v11H9zM15 9V4H5v11h4",
  done: "M5 12.5l4.5 4.5L19 7.5",
  retry: "M20 11a8 8 0 1 0-2.3 6.3M20 4v7h-7",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  trash: "M5 7h14M9 7V4h6v3M7 7l1 13h8l1-13M10 11v5M14 11v5",
  save: "M12 4v11M7 10l5 5 5-5M5 20h14",
  tune: "M4 7h9M17 7h3M4 17h3M11 17h9M15 4.5v5M9 14.5v5",
  key: "M14 10a4 4 0 1 1-1.2-2.8M14 10h7M18 10v4M13.6 8.5A4 4 0 0 1 14 10",
  down: "M12 5v14M6 13l6 6 6-6",
};
const FILLS = {
  stop: "M7 5.5h10A1.5 1.5 0 0 1 18.5 7v10a1.5 1.5 0 0 1-1.5 1.5H7A1.5 1.5 0 0 1 5.5 17V7A1.5 1.5 0 0 1 7 5.5z",
  flame: "M12 1.5c1.5 4.5 6.8 6.8 6.8 12.8a6.8 6.8 0 0 1-13.6 0c0-3.8 2.3-5.3 3-8.3 2.3 1.5 3 3 3 5.3 1.5-2.3 1.5-6 .8-9.8z",
};

/**
 * Make an element. `properties` are set on it; `class` and names with a hyphen are attributes.
 * Children are nodes or texts; null, undefined and false are left out.
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class" || name.includes("-")) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child != null && child !== false));
  return made;
}

/** Draw one of the icons above; it says nothing to a screen reader. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  const filled = name in FILLS;
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("class", filled ? "icon filled" : "icon");
  path.setAttribute("d", filled ? FILLS[name] : STROKES[name]);
  svg.append(path);
  return svg;
}

/** Make a button that shows an icon alone; `label` is its name and its tooltip. */
export function iconButton(name, label, onclick, properties = {}) {
  const made = element("button", { type: "button", title: label, onclick, ...properties }, icon(name));
  made.classList.add("icon-button");
  made.setAttribute("aria-label", label);
  return made;
}

export const byId = (id) => document.getElementById(id);

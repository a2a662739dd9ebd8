// The timeline picture: lanes of boxes on one canvas. Drag or arrow keys move, the buttons, + and -,
// Ctrl + wheel and two fingers zoom, a tap or the pointer names a box. Times are integer ns.
"use strict";
(function () {
  const source = document.getElementById("timeline-data");
  const canvas = document.getElementById("timeline");
  if (!source || !canvas) return;
  const data = JSON.parse(source.textContent);
  const readout = document.getElementById("timeline-readout");
  const pen = canvas.getContext("2d");
  const LABEL = 15, STRIP = 10, LANE = 20, GAP = 8, HEAD = 20, SHORTEST = 200;
  let from = 0, to = data.span_ns, ink = {}, width = 0, picked = null;

  const tops = [];
  let height = HEAD;
  for (const lane of data.lanes) {
    if (lane.title) height += LABEL + 4;
    height += LABEL;
    tops.push(height);
    height += (lane.strip ? STRIP : LANE) + GAP;
  }
  canvas.style.height = height + "px";

  function colours() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["text", "muted", "line", "panel"].concat(data.colours))
      ink[name] = style.getPropertyValue("--" + name).trim();
  }

  function text_of(ns) {
    const size = Math.abs(ns);
    if (size >= 1e9) return (ns / 1e9).toFixed(3) + " s";
    if (size >= 1e6) return (ns / 1e6).toFixed(3) + " ms";
    return (ns / 1e3).toFixed(size < 1e4 ? 2 : 1) + " us";
  }

  function to_x(ns) { return ((ns - from) / (to - from)) * width; }

  function draw() {
    const scale = window.devicePixelRatio || 1;
    width = canvas.clientWidth;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    axis();
    data.lanes.forEach(draw_lane);
  }

  function axis() {
    const about = (to - from) / Math.max(2, Math.floor(width / 110));
    const power = Math.pow(10, Math.floor(Math.log10(about)));
    const step = power * [1, 2, 5, 10].find((m) => m * power >= about);
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
      const x = Math.round(to_x(t)) + 0.5;
      pen.strokeStyle = ink.line;
      pen.beginPath(); pen.moveTo(x, HEAD - 4); pen.lineTo(x, height); pen.stroke();
      const text = t === 0 ? "0" : text_of(t), half = pen.measureText(text).width / 2;
      pen.fillStyle = ink.muted;
      pen.fillText(text, Math.min(Math.max(x - half, 0), width - 2 * half), HEAD / 2);
    }
  }

  function draw_lane(lane, index) {
    const y = tops[index], high = lane.strip ? STRIP : LANE;
    if (lane.title) {
      pen.fillStyle = ink.text;
      pen.font = "bold 12px system-ui, sans-serif";
      pen.fillText(lane.title, 0, y - 1.5 * LABEL - 2);
      pen.font = "11px system-ui, sans-serif";
    }
    pen.fillStyle = ink.muted;
    pen.fillText(lane.label, 0, y - LABEL / 2);
    pen.fillStyle = ink.panel;
    pen.fillRect(0, y, width, high);
    const boxes = lane.boxes;
    for (let i = 0; i < boxes.length; i += 4) {
      const end = boxes[i] + boxes[i + 1];
      if (end < from || boxes[i] > to) continue;
      const x = Math.max(to_x(boxes[i]), -1), right = Math.min(to_x(end), width + 1);
      const wide = Math.max(right - x, 0.7);
      pen.fillStyle = ink[data.colours[boxes[i + 2]]];
      pen.fillRect(x, y, wide > 3 ? wide - 0.5 : wide, high);
      if (picked && picked[0] === index && picked[1] === i) {
        pen.strokeStyle = ink.text; pen.lineWidth = 2;
        pen.strokeRect(x, y, wide, high); pen.lineWidth = 1;
      }
      if (wide > 46 && !lane.strip) name_box(data.names[boxes[i + 3]], x, y, wide, high);
    }
  }

  function name_box(name, x, y, wide, high) {
    pen.save();
    pen.beginPath(); pen.rect(x + 3, y, wide - 6, high); pen.clip();
    pen.fillStyle = "#fff";
    pen.fillText(name.slice(0, 80), Math.max(x, 0) + 4, y + high / 2);
    pen.restore();
  }

  function find(x, y) {
    for (let lane = 0; lane < tops.length; lane++) {
      const high = data.lanes[lane].strip ? STRIP : LANE;
      if (y < tops[lane] - 2 || y > tops[lane] + high + 2) continue;
      const boxes = data.lanes[lane].boxes, at = from + (x / width) * (to - from);
      const slack = (3 / width) * (to - from);
      let best = null, least = Infinity;
      for (let i = 0; i < boxes.length; i += 4) {
        const off = Math.max(boxes[i] - at, at - boxes[i] - boxes[i + 1], 0);
        if (off <= slack && off < least) { least = off; best = [lane, i]; }
      }
      return best;
    }
    return null;
  }

  function point(event) {
    const edge = canvas.getBoundingClientRect();
    const hit = find(event.clientX - edge.left, event.clientY - edge.top);
    if (String(hit) === String(picked)) return;
    picked = hit;
    if (hit) {
      const lane = data.lanes[hit[0]], b = lane.boxes, i = hit[1];
      readout.textContent = data.names[b[i + 3]] + ": " + text_of(b[i + 1]) + ", from " +
        text_of(b[i]) + " to " + text_of(b[i] + b[i + 1]) + ", " + lane.where;
    }
    draw();
  }

  function show(first, last) {
    const span = Math.min(Math.max(last - first, SHORTEST), data.span_ns);
    const middle = (first + last) / 2;
    from = Math.min(Math.max(middle - span / 2, 0), data.span_ns - span);
    to = from + span;
    draw();
  }

  function zoom(factor, share) {
    const at = from + share * (to - from), span = (to - from) * factor;
    show(at - share * span, at + (1 - share) * span);
  }

  function move(share) {
    const by = Math.min(Math.max(share * (to - from), -from), data.span_ns - to);
    from += by; to += by;
    draw();
  }

  const fingers = new Map();
  canvas.addEventListener("pointerdown", function (event) {
    fingers.set(event.pointerId, event.clientX);
    canvas.setPointerCapture(event.pointerId);
    point(event);
  });
  canvas.addEventListener("pointermove", function (event) {
    if (!fingers.has(event.pointerId)) { point(event); return; }
    const before = Array.from(fingers.values());
    fingers.set(event.pointerId, event.clientX);
    const now = Array.from(fingers.values());
    if (now.length === 1) { move((before[0] - now[0]) / width); return; }
    const apart = [Math.abs(before[0] - before[1]), Math.abs(now[0] - now[1])];
    const left = canvas.getBoundingClientRect().left;
    if (apart[0] > 8 && apart[1] > 8)
      zoom(apart[0] / apart[1], ((now[0] + now[1]) / 2 - left) / width);
  });
  for (const name of ["pointerup", "pointercancel"])
    canvas.addEventListener(name, function (event) { fingers.delete(event.pointerId); });
  canvas.addEventListener("wheel", function (event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const left = canvas.getBoundingClientRect().left;
    zoom(Math.exp(event.deltaY / 300), (event.clientX - left) / width);
  }, { passive: false });
  canvas.addEventListener("dblclick", function (event) {
    zoom(0.4, (event.clientX - canvas.getBoundingClientRect().left) / width);
  });

  const actions = {
    in: () => zoom(0.5, 0.5), out: () => zoom(2, 0.5), all: () => show(0, data.span_ns),
    left: () => move(-0.3), right: () => move(0.3),
  };
  const keys = { "+": "in", "=": "in", "-": "out", 0: "all", ArrowLeft: "left", ArrowRight: "right" };
  canvas.addEventListener("keydown", function (event) {
    if (!(event.key in keys)) return;
    event.preventDefault();
    actions[keys[event.key]]();
  });
  for (const button of document.querySelectorAll("[data-zoom]"))
    button.addEventListener("click", () => actions[button.dataset.zoom]());
  for (const button of document.querySelectorAll("[data-from]"))
    button.addEventListener("click", function () {
      const first = Number(button.dataset.from), last = Number(button.dataset.to);
      show(first - 0.3 * (last - first), last + 0.3 * (last - first));
      canvas.scrollIntoView({ block: "nearest" });
    });

  function repaint() { colours(); draw(); }
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  new ResizeObserver(draw).observe(canvas.parentElement);
  repaint();
})();

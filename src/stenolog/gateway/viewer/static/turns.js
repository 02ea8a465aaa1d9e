// Chart of a session's turns, drawn by uPlot: tokens as bars, costs as a line.

const chart = document.querySelector("#chart");
const label = document.querySelector("#chart-label");
const turns = JSON.parse(chart.dataset.turns);
const priced = turns.some((one) => one.cost !== null);
const column = (value) => turns.map(value);

// Returns a function that reads a colour of the page's present theme.
const colour = (name) => () => getComputedStyle(chart).getPropertyValue(name).trim();
const font = `12px ${getComputedStyle(chart).fontFamily}`;
const grid = { stroke: colour("--faint"), width: 1 };

const short = new Intl.NumberFormat("en", { notation: "compact" });
const dollars = (value) => `$${Number(value.toPrecision(6))}`;
const first = turns[0].number;
const numbers = (_plot, splits) => splits.map((one) => (turns[one - first] ? one : null));

function axis(more) {
  return { stroke: colour("--soft"), font, ticks: { show: false }, grid, ...more };
}

function bars(label, fill) {
  return {
    label,
    fill: colour(fill),
    width: 0,
    points: { show: false },
    paths: uPlot.paths.bars({ size: [0.7, 48], radius: 0.1 }),
  };
}

const cost = {
  label: "cost",
  scale: "cost",
  stroke: colour("--c-tools"),
  width: 2,
  spanGaps: true,
  points: { show: turns.length <= 30, size: 6, fill: colour("--card") },
};

function showLabel(place) {
  label.textContent = turns[place]?.label ?? label.dataset.default;
}

// With fewer than eight turns, the bars are as wide as with eight turns, and start at the left.
const last = first + Math.max(turns.length, 8) - 0.5;
const fromZero = (_plot, _low, high) => [0, (high || 1) * 1.08];
const size = () => ({ width: chart.clientWidth, height: chart.clientWidth < 500 ? 200 : 240 });

const plot = new uPlot(
  {
    ...size(),
    legend: { show: false },
    padding: [12, priced ? 0 : 12, 0, 0],
    scales: {
      x: { time: false, range: () => [first - 0.5, last] },
      y: { range: fromZero },
      cost: { range: fromZero },
    },
    axes: [
      axis({ size: 30, values: numbers, grid: { show: false }, incrs: [1, 2, 5, 10, 20, 50] }),
      axis({ size: 52, values: (_plot, splits) => splits.map((one) => short.format(one)) }),
      ...(priced
        ? [axis({
          scale: "cost", side: 1, size: 64, grid: { show: false },
          values: (_plot, splits) => splits.map(dollars),
        })]
        : []),
    ],
    cursor: { drag: { x: false, y: false }, y: false, points: { show: false } },
    hooks: { setCursor: [({ cursor }) => showLabel(cursor.left < 0 ? null : cursor.idx)] },
    // Output is stacked on input: the sum is drawn first, and the input over it.
    series: [
      {},
      bars("output tokens", "--c-history"),
      bars("input tokens", "--c-summary"),
      ...(priced ? [cost] : []),
    ],
  },
  [
    column((one) => one.number),
    column((one) => one.input_tokens + one.output_tokens),
    column((one) => one.input_tokens),
    ...(priced ? [column((one) => one.cost)] : []),
  ],
  chart,
);

plot.over.addEventListener("click", () => {
  const one = turns[plot.cursor.idx];
  if (one) location.assign(one.address);
});

new ResizeObserver(() => plot.setSize(size())).observe(chart);
new MutationObserver(() => plot.redraw()).observe(document.documentElement, { attributes: true });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw());

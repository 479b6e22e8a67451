"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const settings = {
  responsive: true,
  displaylogo: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  // Without this, plotly offers to upload the chart.
  showSendToCloud: false,
  plotlyServerURL: "",
};
const heights = {};
for (const [key, figure] of Object.entries(figures)) {
  heights[key] = figure.layout.height;
  Plotly.newPlot(key, figure.data, figure.layout, settings);
}

// A chart has the width of the window and does not shrink for the printer by itself. A4 without margins is 186 mm wide,
// and three charts of this height fill it. The height of a chart that grows with the number of tensors is not changed.
const PRINTED = { autosize: false, width: 670 };
const PRINTED_HEIGHT = 230;
addEventListener("beforeprint", () => {
  for (const key in figures) {
    const grown = document.getElementById(key).closest(".scroll");
    Plotly.relayout(key, { ...PRINTED, height: grown ? heights[key] : PRINTED_HEIGHT });
  }
});
addEventListener("afterprint", () => {
  for (const key in figures) Plotly.relayout(key, { autosize: true, width: null, height: heights[key] });
});

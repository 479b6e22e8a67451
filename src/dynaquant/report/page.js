"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const settings = {
  responsive: true,
  displaylogo: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  // plotly would offer to upload the chart.
  showSendToCloud: false,
  plotlyServerURL: "",
};
const heights = {};
for (const [key, figure] of Object.entries(figures)) {
  heights[key] = figure.layout.height;
  Plotly.newPlot(key, figure.data, figure.layout, settings);
}

// A chart is drawn for the width of the window and does not shrink by itself. A4 within its margins is 186 mm wide, and
// three charts of this height fill it; those that grow with the number of tensors stay as they are.
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

"""What the tests read from a report, as JavaScript."""

COUNT = 'document.getElementById("count").textContent'
DETAIL = 'document.getElementById("detail").innerText'
TITLES = '[...document.querySelectorAll("{} .chart h3")].map((x) => x.textContent)'
# The first row of a legend is the step axis, which is hidden.
LEGENDS = """[...document.querySelectorAll("{} .u-legend")].map((legend) =>
  [...legend.querySelectorAll("tr")].slice(1).map((row) => [...row.children].map((x) => x.textContent)))"""


BLOCKS = """[...document.querySelectorAll(".block")]
  .map((block) => [block.classList[1], block.querySelector(".label").textContent])"""

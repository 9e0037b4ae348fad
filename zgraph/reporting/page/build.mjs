// Bundles src/ into page.html, the page without a report in it, and puts the licences of what it bundles beside it.
// page.html carries a hash of its sources, by which a test sees that it belongs to them.
import { createHash } from "node:crypto";
import { existsSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { join } from "node:path";
import { build } from "esbuild";

const here = fileURLToPath(new URL(".", import.meta.url));
const target = process.argv[2] ?? here;
const read = (...path) => readFileSync(join(here, ...path), "utf8");

const sources = ["build.mjs", "package-lock.json", "package.json", "tsconfig.json"]
  .concat(readdirSync(join(here, "src")).map((name) => `src/${name}`))
  .sort();
const hash = createHash("sha256");
for (const name of sources) hash.update(`${name}\0${read(name)}\0`);

const packages = new Set();

/** One script with all that it imports, as text that can stand in a page. */
async function bundled(entry) {
  const { outputFiles, metafile } = await build({
    absWorkingDir: here,
    entryPoints: [entry],
    bundle: true,
    minify: true,
    write: false,
    format: "iife",
    target: "es2022",
    charset: "ascii",
    legalComments: "none",
    metafile: true,
    define: { "process.env.NODE_ENV": '"production"' },
  });
  for (const path of Object.keys(metafile.inputs)) {
    const found = /node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(path);
    if (found) packages.add(found[1]);
  }
  return outputFiles[0].text.replaceAll("</script", "<\\/script").replaceAll("<!--", "<\\!--").trim();
}

const script = await bundled("src/main.ts");
const layout = await bundled("src/layout_worker.ts"); // runs in a thread of its own, which needs a text of its own
const known = [...packages].sort().map((name) => ({ name, ...JSON.parse(read("node_modules", name, "package.json")) }));
const notices = known.map(({ name, version, license }) => {
  const file = ["LICENSE", "LICENSE.txt", "LICENSE.md", "license"].find((each) =>
    existsSync(join(here, "node_modules", name, each)),
  );
  const text = file ? read("node_modules", name, file).replaceAll("\r\n", "\n").trim() : `Licence: ${license}`;
  return `${name} ${version} (${license})\n\n${text}\n`;
});
const rule = `\n${"-".repeat(100)}\n\n`;
writeFileSync(join(target, "THIRD-PARTY.txt"), `page.html contains these packages.\n${rule}${notices.join(rule)}`);

const style = await build({
  absWorkingDir: here,
  entryPoints: ["src/page.css"],
  minify: true,
  write: false,
});
const page = read("src", "page.html")
  .replace("{{source}}", hash.digest("hex"))
  .replace("{{packages}}", known.map(({ name, version, license }) => `${name} ${version}, ${license}`).join("; "))
  .replace("{{style}}", () => style.outputFiles[0].text.trim())
  .replace("{{layout}}", () => layout)
  .replace("{{script}}", () => script);
writeFileSync(join(target, "page.html"), page);

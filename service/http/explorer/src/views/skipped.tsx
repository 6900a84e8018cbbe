// The files of an explored place that cannot be used, and why.

import { askJson } from "../api";
import { useLoaded } from "../loaded";
import { Heading, Once } from "../parts";
import { count } from "../text";
import type { SkippedFiles } from "../wire";

const MOST = 500;

export function Skipped() {
  const skipped = useLoaded(
    (signal) => askJson<SkippedFiles>(`v1/exploration/skipped?limit=${MOST}`, { signal }),
    [],
  );
  return (
    <>
      <Heading>Skipped files</Heading>
      <Once loaded={skipped}>
        {({ total, files }) => (
          <>
            <p class="soft">
              {count(files.length)} of {count(total)}
            </p>
            <table>
              <thead>
                <tr>
                  <th scope="col">File</th>
                  <th scope="col">Why</th>
                </tr>
              </thead>
              <tbody>
                {files.map(({ key, detail }) => (
                  <tr key={key}>
                    <th scope="row">
                      <bdi>{key}</bdi>
                    </th>
                    <td>{detail}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </>
        )}
      </Once>
    </>
  );
}

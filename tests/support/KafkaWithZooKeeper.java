import java.io.FileReader;
import java.util.Properties;
import org.apache.zookeeper.server.ZooKeeperServerMain;

/** Runs a broker, and in the same JVM the ZooKeeper that its settings name: SERVER.PROPERTIES. */
public class KafkaWithZooKeeper {
    public static void main(String[] words) throws Exception {
        Properties settings = new Properties();
        settings.load(new FileReader(words[0]));
        String port = settings.getProperty("zookeeper.connect").split(":")[1];
        String folder = settings.getProperty("log.dirs") + "-zookeeper";
        Thread keeper = new Thread(() -> ZooKeeperServerMain.main(new String[] {port, folder}), "zookeeper");
        keeper.setDaemon(true);
        keeper.start();
        kafka.Kafka.main(words);
    }
}
